#!lua flags=allow-oom
-- The owner's last write to a session that another replica goes on with: nothing may be open and the
-- chain must end where the owner believes it does; then fence and nonce are those that the replica
-- offered, and the lease is its own from this moment. A repeat is told apart by the nonce that was
-- released last.
-- KEYS meta
-- ARGV fence nonce head next_fence next_replica lease_ms
local meta = read_meta()
if meta.phase and redis.call('HGET', KEYS[1], 'released') == ARGV[2] then
  return { 'ok' }
end
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
if meta.phase ~= 'open' or meta.head ~= ARGV[3] or meta.open ~= '' then
  return head_seen(meta)
end
local fields = { 'next_fence', 'next_nonce', 'next_replica', 'next_address', 'next_until',
  'next_asked' }
local offer = redis.call('HMGET', KEYS[1], unpack(fields))
local now = now_ms()
if offer[1] ~= ARGV[4] or offer[3] ~= ARGV[5] or tonumber(offer[5]) <= now then
  return { 'unoffered', 'that replica has not offered it under that fence' }
end
if tonumber(ARGV[4]) <= tonumber(meta.fence) then
  return { 'stale', meta.fence }
end
-- The era stays that of the acquisition, as with a renewal.
redis.call('HSET', KEYS[1], 'fence', offer[1], 'nonce', offer[2], 'replica', offer[3],
  'address', offer[4], 'until', text(now + tonumber(ARGV[6])), 'woken', '1', 'released', ARGV[2],
  'asked', offer[3] .. ' ' .. (offer[6] or ''))
redis.call('HDEL', KEYS[1], unpack(fields))
return { 'ok' }
