-- What a client says that is no part of the conversation: its numbers, and how much it has played.
-- What it has played need not be sent again: those events leave the journal. Nothing counts as
-- played that has not sounded. Sent again it does the same; where it comes late, behind newer
-- numbers (its repeat was there first), these stand.
-- KEYS meta events events_order
-- ARGV fence nonce client_applied ("" = as it is) turn ("" = nothing played) samples through_event
local function newest(applied)
  return tonumber(string.match(applied or '', '(%d+):[^ ]*$') or '0')
end

local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
local fields = { 'voice_turn', 'voice_samples', 'played_turn', 'played_samples', 'events_first',
  'events_last', 'events_bytes' }
local values = redis.call('HMGET', KEYS[1], unpack(fields))
local turn, samples = tonumber(ARGV[4]), tonumber(ARGV[5])
if turn then
  local sounds, of_it = tonumber(values[1] or '') or 0, tonumber(values[2] or '') or 0
  if turn > sounds or (turn == sounds and samples > of_it) then
    return { 'events', values[6], 'more is played than has sounded' }
  end
end
local known = redis.call('HGET', KEYS[1], 'client_applied')
if ARGV[3] ~= '' and newest(ARGV[3]) >= newest(known or '') then
  redis.call('HSET', KEYS[1], 'client_applied', ARGV[3])
end
if turn then
  local before, played = tonumber(values[3] or '') or 0, tonumber(values[4] or '') or 0
  if turn > before or (turn == before and samples > played) then
    redis.call('HSET', KEYS[1], 'played_turn', ARGV[4], 'played_samples', ARGV[5])
  end
  local through = tonumber(ARGV[6])
  local first, bytes = trim_events(KEYS[2], KEYS[3], tonumber(values[5]), tonumber(values[6]),
    tonumber(values[7]), function(number)
      return number <= through
    end)
  redis.call('HSET', KEYS[1], 'events_first', text(first), 'events_bytes', text(bytes))
end
return { 'ok' }
