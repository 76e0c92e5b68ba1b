#!lua flags=allow-oom
-- An entry beside the units; small, and without it a session on a full server could neither count a
-- redo nor end. place says where it may stand: "open" (redo: the open unit is seq), "last" (closed:
-- seq is the last committed unit).
-- KEYS meta entries order
-- ARGV fence nonce op prev_hash seq hash record place
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
if meta.op == ARGV[3] then
  return { 'ok', meta.index }
end
local fits = (ARGV[8] == 'open' and meta.open or meta.committed) == ARGV[5]
if meta.head ~= ARGV[4] or not fits then
  return head_seen(meta)
end
local index = text(tonumber(meta.index) + 1)
redis.call('HSET', KEYS[2], index, ARGV[7])
redis.call('RPUSH', KEYS[3], ARGV[5] .. ' ' .. ARGV[6])
redis.call('HSET', KEYS[1], 'head', ARGV[6], 'index', index, 'op', ARGV[3],
  'bytes', text(tonumber(meta.bytes) + #ARGV[7]))
keep_expiry(redis.call('HGET', KEYS[1], 'retention'), KEYS[3])
return { 'ok', index }
