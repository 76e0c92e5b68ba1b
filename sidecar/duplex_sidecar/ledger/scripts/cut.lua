-- A client's command that changes what was said, between two units: its entry, both states after
-- it, the events that tell of it, and its number, all or nothing.
-- KEYS meta entries order state events events_order
-- ARGV fence nonce op prev_hash seq hash record state voice_state
--      client_applied ("" = as it is) first_seq event...
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
if meta.op == ARGV[3] then
  return { 'ok', meta.index }
end
if meta.head ~= ARGV[4] or meta.committed ~= ARGV[5] or meta.open ~= '' then
  return head_seen(meta)
end
local values = redis.call('HMGET', KEYS[1], 'events_last', 'events_bytes', 'retention')
local last, bytes = tonumber(values[1]), tonumber(values[2])
if tonumber(ARGV[11]) ~= last + 1 then
  return { 'events', text(last), 'sequence is not last + 1' }
end
local index = text(tonumber(meta.index) + 1)
redis.call('HSET', KEYS[2], index, ARGV[7])
redis.call('HSET', KEYS[4], 'committed', ARGV[8], 'voice', ARGV[9])
redis.call('RPUSH', KEYS[3], ARGV[5] .. ' ' .. ARGV[6])
last, bytes = append_events(KEYS[5], KEYS[6], last, bytes, 12)
redis.call('HSET', KEYS[1], 'head', ARGV[6], 'index', index, 'op', ARGV[3],
  'bytes', text(tonumber(meta.bytes) + #ARGV[7]), 'events_last', text(last),
  'events_bytes', text(bytes))
if ARGV[10] ~= '' then
  redis.call('HSET', KEYS[1], 'client_applied', ARGV[10])
end
keep_expiry(values[3], KEYS[3], KEYS[5], KEYS[6])
return { 'ok', index }
