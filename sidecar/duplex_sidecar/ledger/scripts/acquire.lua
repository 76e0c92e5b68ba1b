#!lua flags=allow-oom
-- Takes the lease: a larger fence, the caller's nonce. The nonce is the operation id. Wakes a parked
-- session. A fence that was issued to this very replica is its own still: a second call under it
-- (the first one's caller gave up) gets the same fence with the new nonce.
-- KEYS meta
-- ARGV nonce replica lease_ms fence ("" = recorded + 1) address asked ("clock microseconds")
local meta = read_meta()
local refusal = refuse_without_session(meta)
if refusal then
  return refusal
end
if meta.phase == 'ended' then
  return { 'ended', meta.reason }
end
if meta.nonce == ARGV[1] then
  return { 'ok', meta.fence, meta.era, redis.call('HGET', KEYS[1], 'woken') or '0' }
end
-- A call that comes behind a later one of its replica is nobody's any more.
local asked = ARGV[2] .. ' ' .. ARGV[6]
if made_before(asked, redis.call('HGET', KEYS[1], 'asked') or '') then
  return { 'stale', meta.fence }
end
local now, era, fence = now_ms(), server_era(), tonumber(meta.fence)
local lease_ms = tonumber(ARGV[3])
local left = tonumber(meta['until']) - now
local again = meta.nonce ~= '' and meta.replica == ARGV[2] and meta.fence == ARGV[4]
  and meta.era == era
if ARGV[4] ~= '' and tonumber(ARGV[4]) <= fence and not again then
  return { 'stale', meta.fence }
end
if meta.nonce ~= '' and left > lease_ms and not again then
  -- The server's clock went back: an owner that is there renews, no other lease lasts so long.
  left = lease_ms
  redis.call('HSET', KEYS[1], 'until', text(now + left))
end
if meta.nonce ~= '' and left > 0 and not again then
  return { 'held', meta.replica, text(left), meta.nonce }
end
local step = 1
if meta.era ~= era and meta.era ~= '' then  -- an imported session has had no owner yet
  -- This server may have missed a later owner (failover to a stale replica): give that owner one
  -- lease time to be refused, and step over any fence it can have had.
  local settle = redis.call('HMGET', KEYS[1], 'settle_era', 'settle_until')
  if settle[1] ~= era or tonumber(settle[2]) > now + lease_ms then
    redis.call('HSET', KEYS[1], 'settle_era', era, 'settle_until', text(now + lease_ms))
    return { 'settling', ARGV[3] }
  end
  if tonumber(settle[2]) > now then
    return { 'settling', text(tonumber(settle[2]) - now) }
  end
  step = 1000000
end
-- A number that an operator issued is larger than any that a lost owner can have had.
fence = ARGV[4] == '' and fence + step or tonumber(ARGV[4])
local woken = meta.phase == 'parked' and '1' or '0'
redis.call('HSET', KEYS[1], 'phase', 'open', 'reason', '', 'fence', text(fence), 'nonce', ARGV[1],
  'replica', ARGV[2], 'address', ARGV[5], 'woken', woken, 'until', text(now + tonumber(ARGV[3])),
  'era', era, 'asked', asked)
return { 'ok', text(fence), era, woken }
