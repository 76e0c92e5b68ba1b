#!lua flags=allow-oom
-- Leaves a tombstone in meta (refuses writers and re-creation until it expires) and unlinks all
-- else; the server frees the memory in the background. `confirmed`: every replica has it, too.
-- KEYS all, meta first
-- ARGV tombstone_ms confirmed ("1" on a repeat, once the replicas have said so; else "0")
local present = redis.call('EXISTS', unpack(KEYS))
local erased = redis.call('HGET', KEYS[1], 'phase') == 'erased'
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'phase', 'erased', 'erased_at', text(now_ms()), 'confirmed',
  erased and ARGV[2] or '0')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
for i = 2, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
return { 'ok', text(erased and 0 or present) }
