-- Events become durable before their first byte leaves, with the codes that sound in them.
-- The journal has a head of its own (its last sequence): it runs beside accepts and commits. What
-- ties it to the chain is the unit, which must be committed.
-- KEYS meta events events_order voice state
-- ARGV fence nonce op unit first_seq max_bytes max_age_ms voiced has_state state
--      mark_turn ("" = no mark) mark_from mark_to mark event...
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
local fields = { 'events_first', 'events_last', 'events_bytes', 'events_op', 'voice_turn',
  'voice_samples', 'voiced', 'retention' }
local values = redis.call('HMGET', KEYS[1], unpack(fields))
local first, last, bytes = tonumber(values[1]), tonumber(values[2]), tonumber(values[3])
if values[4] == ARGV[3] then
  return { 'ok', text(last) }
end
if tonumber(ARGV[5]) ~= last + 1 then
  return { 'events', text(last), 'sequence is not last + 1' }
end
if tonumber(ARGV[4]) > tonumber(meta.committed) then
  return { 'events', text(last), 'unit is not committed' }
end
local new_turn = ARGV[11] ~= '' and ARGV[11] ~= values[5]
if ARGV[11] ~= '' then
  local expected = new_turn and '0' or values[6]
  local older = new_turn and values[5] ~= '' and tonumber(ARGV[11]) < tonumber(values[5])
  if older or ARGV[12] ~= expected then
    return { 'events', text(last), 'audio does not follow sample ' .. expected .. ' of its turn' }
  end
end

last, bytes = append_events(KEYS[2], KEYS[3], last, bytes, 15)
if ARGV[11] ~= '' then
  if new_turn then
    redis.call('DEL', KEYS[4])
  end
  redis.call('RPUSH', KEYS[4], ARGV[14])
  redis.call('LTRIM', KEYS[4], -600, -1)
  redis.call('HSET', KEYS[1], 'voice_turn', ARGV[11], 'voice_samples', ARGV[13])
end
if ARGV[9] == '1' then
  redis.call('HSET', KEYS[5], 'voice', ARGV[10], 'voice_unit', ARGV[4])
end
local voiced = tonumber(values[7])
if ARGV[8] ~= '' then
  voiced = math.max(voiced, tonumber(ARGV[8]))
end
redis.call('HSET', KEYS[1], 'events_last', text(last), 'events_op', ARGV[3], 'voiced', text(voiced))
keep_expiry(values[8], KEYS[2], KEYS[3], KEYS[4])

-- A batch is smaller than max_bytes (checked by the caller), so its own events stay.
local oldest, most = now_ms() - tonumber(ARGV[7]), tonumber(ARGV[6])
first, bytes = trim_events(KEYS[2], KEYS[3], first, last, bytes, function(_, held, at)
  return held > most or at < oldest
end)
redis.call('HSET', KEYS[1], 'events_first', text(first), 'events_bytes', text(bytes))
return { 'ok', text(last) }
