#!lua flags=allow-oom
-- The owner's last write: gives the lease up, and may end the session. A repeat is told apart by the
-- nonce that was released last.
-- KEYS meta
-- ARGV fence nonce phase ("" = unchanged) reason
local meta = read_meta()
if meta.phase and redis.call('HGET', KEYS[1], 'released') == ARGV[2] then
  return { 'ok' }
end
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
redis.call('HSET', KEYS[1], 'nonce', '', 'replica', '', 'address', '', 'until', '0',
  'released', ARGV[2])
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'phase', ARGV[3], 'reason', ARGV[4])
end
return { 'ok' }
