-- Counts what the chain knows nothing of, behind one committed unit: how often it was run again for
-- its sound (its tokens stand), or how often an owner failed there without a named reason. The count
-- bounds what such a unit can cost; it begins anew behind the next one.
-- KEYS meta
-- ARGV fence nonce op seq what ("respeak" or "failure")
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
local what = ARGV[5]
local seen = redis.call('HMGET', KEYS[1], what .. '_op', what .. '_seq', what .. '_count')
local count = seen[2] == ARGV[4] and tonumber(seen[3]) or 0
if seen[1] ~= ARGV[3] then
  count = count + 1
  redis.call('HSET', KEYS[1], what .. '_op', ARGV[3], what .. '_seq', ARGV[4], what .. '_count',
    text(count))
end
return { 'ok', text(count) }
