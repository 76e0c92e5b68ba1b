#!lua flags=allow-oom
-- An entry beside the units; small, and without it a session on a full server could neither count a
-- redo nor end. place says where it may stand: "open" (redo: the open unit is seq),
-- "between" (truncated: seq is committed, nothing is open, so that a redo keeps its state),
-- "last" (closed: seq is the last committed unit).
-- KEYS meta entries order state
-- ARGV fence nonce op prev_hash seq hash record has_state state place
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
if meta.op == ARGV[3] then
  return { 'ok', meta.index }
end
local redo = ARGV[10] == 'open'
local fits = (redo and meta.open or meta.committed) == ARGV[5]
if meta.head ~= ARGV[4] or not fits or (ARGV[10] == 'between' and meta.open ~= '') then
  return head_seen(meta)
end
local index = text(tonumber(meta.index) + 1)
redis.call('HSET', KEYS[2], index, ARGV[7])
if ARGV[8] == '1' then
  redis.call('HSET', KEYS[4], 'committed', ARGV[9])
end
redis.call('RPUSH', KEYS[3], ARGV[5] .. ' ' .. ARGV[6])
redis.call('HSET', KEYS[1], 'head', ARGV[6], 'index', index, 'op', ARGV[3],
  'bytes', text(tonumber(meta.bytes) + #ARGV[7]))
keep_expiry(redis.call('HGET', KEYS[1], 'retention'), KEYS[3])
return { 'ok', index }
