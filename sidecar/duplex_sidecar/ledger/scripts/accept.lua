-- A unit's input becomes durable: its record, blobs and, if given, the state after its framing.
-- Trims nothing: a redo needs what the last commit kept.
-- KEYS meta entries order pcm rows frames state
-- ARGV fence nonce op prev_hash seq hash record has_state state pcm rows frames max_bytes
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
if meta.op == ARGV[3] then
  return { 'ok', meta.index }
end
if meta.head ~= ARGV[4] or meta.open ~= '' or tonumber(meta.committed) + 1 ~= tonumber(ARGV[5]) then
  return head_seen(meta)
end
local bytes = tonumber(meta.bytes) + #ARGV[7] + #ARGV[10] + #ARGV[11] + #ARGV[12]
if bytes > tonumber(ARGV[13]) then
  return { 'full', text(bytes) }
end
local index = text(tonumber(meta.index) + 1)
redis.call('HSET', KEYS[2], index, ARGV[7])
for blob = 1, 3 do
  if ARGV[9 + blob] ~= '' then
    redis.call('HSET', KEYS[3 + blob], ARGV[5], ARGV[9 + blob])
  end
end
if ARGV[8] == '1' then
  redis.call('HSET', KEYS[7], 'accepted', ARGV[9])
end
redis.call('RPUSH', KEYS[3], ARGV[5] .. ' ' .. ARGV[6])
redis.call('HSET', KEYS[1], 'head', ARGV[6], 'index', index, 'open', ARGV[5], 'op', ARGV[3],
  'bytes', text(bytes))
keep_expiry(redis.call('HGET', KEYS[1], 'retention'), KEYS[3], KEYS[4], KEYS[5], KEYS[6])
return { 'ok', index }
