#!lua flags=allow-oom
-- The owner's last write to a session that is to wait: nothing may be open and the chain must end
-- where the owner believes it does; then the phase is `parked` and the lease is given up, at once.
-- All keys get their whole retention from here. A repeat is told apart by the nonce released last.
-- KEYS all, meta first
-- ARGV fence nonce head reason
local meta = read_meta()
if meta.phase == 'parked' and redis.call('HGET', KEYS[1], 'released') == ARGV[2] then
  return { 'ok' }
end
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
if meta.phase ~= 'open' or meta.head ~= ARGV[3] or meta.open ~= '' then
  return head_seen(meta)
end
redis.call('HSET', KEYS[1], 'phase', 'parked', 'reason', ARGV[4], 'nonce', '', 'replica', '',
  'address', '', 'until', '0', 'released', ARGV[2], 'touched', text(now_ms()))
local retention = redis.call('HGET', KEYS[1], 'retention')
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, retention)
end
return { 'ok' }
