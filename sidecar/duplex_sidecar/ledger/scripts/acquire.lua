#!lua flags=allow-oom
-- Takes the lease: a larger fence, the caller's nonce. The nonce is the operation id.
-- KEYS meta
-- ARGV nonce replica lease_ms fence ("" = recorded + 1)
local meta = read_meta()
local refusal = refuse_without_session(meta)
if refusal then
  return refusal
end
if meta.phase == 'ended' then
  return { 'ended', meta.reason }
end
if meta.nonce == ARGV[1] then
  return { 'ok', meta.fence, meta.era, meta.index, meta.head, meta.committed, meta.open }
end
local now, era, fence = now_ms(), server_era(), tonumber(meta.fence)
local left = tonumber(meta['until']) - now
if meta.nonce ~= '' and left > 0 then
  return { 'held', meta.replica, text(left) }
end
local step = 1
if meta.era ~= era and fence > 0 then
  -- This server may have missed a later owner (failover to a stale replica): give that owner one
  -- lease time to be refused, and step over any fence it can have had.
  local settle = redis.call('HMGET', KEYS[1], 'settle_era', 'settle_until')
  if settle[1] ~= era then
    redis.call('HSET', KEYS[1], 'settle_era', era, 'settle_until', text(now + tonumber(ARGV[3])))
    return { 'settling', ARGV[3] }
  end
  if tonumber(settle[2]) > now then
    return { 'settling', text(tonumber(settle[2]) - now) }
  end
  step = 1000000
end
if ARGV[4] == '' then
  fence = fence + step
elseif tonumber(ARGV[4]) > fence then
  fence = tonumber(ARGV[4])
else
  return { 'stale', meta.fence }
end
redis.call('HSET', KEYS[1], 'fence', text(fence), 'nonce', ARGV[1], 'replica', ARGV[2],
  'until', text(now + tonumber(ARGV[3])), 'era', era)
return { 'ok', text(fence), era, meta.index, meta.head, meta.committed, meta.open }
