-- A unit's answer becomes durable with the state after it; then what slid out is dropped.
-- KEYS meta entries order pcm rows frames state
-- ARGV fence nonce op prev_hash seq hash record state window_below pcm_below records_below
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
if meta.op == ARGV[3] then
  return { 'ok', meta.index }
end
if meta.head ~= ARGV[4] or meta.open ~= ARGV[5] then
  return head_seen(meta)
end
local index = text(tonumber(meta.index) + 1)
redis.call('HSET', KEYS[2], index, ARGV[7])
redis.call('HSET', KEYS[7], 'committed', ARGV[8])
redis.call('RPUSH', KEYS[3], ARGV[5] .. ' ' .. ARGV[6])

local bytes = tonumber(meta.bytes) + #ARGV[7]
local window_floor = math.max(tonumber(meta.window_floor), tonumber(ARGV[9]))
local pcm_floor = math.max(tonumber(meta.pcm_floor), tonumber(ARGV[10]))
redis.call('HSET', KEYS[1], 'head', ARGV[6], 'index', index, 'open', '', 'committed', ARGV[5],
  'op', ARGV[3], 'window_floor', text(window_floor), 'pcm_floor', text(pcm_floor))

bytes = bytes - trim_units(KEYS[5], tonumber(meta.window_floor), window_floor)
bytes = bytes - trim_units(KEYS[6], tonumber(meta.window_floor), window_floor)
bytes = bytes - trim_units(KEYS[4], tonumber(meta.pcm_floor), pcm_floor)
redis.call('HDEL', KEYS[7], 'accepted')

-- About 64 entries a call, whole units only; a commit adds two or three, so a backlog shrinks with
-- each unit.
local first, trimmed, last_seq, floor_hash = tonumber(meta.records_first), 0, nil, nil
while true do
  local seq, hash = string.match(redis.call('LINDEX', KEYS[3], 0) or '', '^(%d+) (%x+)$')
  if not seq or tonumber(seq) >= tonumber(ARGV[11]) or (trimmed >= 64 and seq ~= last_seq) then
    break
  end
  local field = text(first)
  bytes = bytes - redis.call('HSTRLEN', KEYS[2], field)
  redis.call('LPOP', KEYS[3])
  redis.call('HDEL', KEYS[2], field)
  first, trimmed, last_seq, floor_hash = first + 1, trimmed + 1, seq, hash
end
if floor_hash then
  redis.call('HSET', KEYS[1], 'records_first', text(first), 'floor_hash', floor_hash)
end
redis.call('HSET', KEYS[1], 'bytes', text(bytes))
return { 'ok', index }
