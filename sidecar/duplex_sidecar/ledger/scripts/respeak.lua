-- Counts how often a committed unit was run again for its sound, before it is. The chain knows of
-- no such thing (its tokens stand); the count bounds what a unit that ends engines can cost.
-- KEYS meta
-- ARGV fence nonce op seq
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
local seen = redis.call('HMGET', KEYS[1], 'respeak_op', 'respeak_seq', 'respeak_count')
local count = seen[2] == ARGV[4] and tonumber(seen[3]) or 0
if seen[1] ~= ARGV[3] then
  count = count + 1
  redis.call('HSET', KEYS[1], 'respeak_op', ARGV[3], 'respeak_seq', ARGV[4], 'respeak_count',
    text(count))
end
return { 'ok', text(count) }
