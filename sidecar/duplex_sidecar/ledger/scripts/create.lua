-- Opens a session's ledger: entry 0, its reference rows, the first state.
-- KEYS meta entries rows state
-- ARGV op hash record rows state token_sha256 retention_ms
local meta = read_meta()
if meta.phase == 'erased' then
  return { 'erased' }
end
if meta.phase then
  if redis.call('HGET', KEYS[1], 'create_op') == ARGV[1] then
    return { 'ok', '0' }
  end
  return { 'exists' }
end
-- Sessions that are there need the rest: a full server refuses their units.
local memory = redis.call('INFO', 'memory')
local used = tonumber(string.match(memory, 'used_memory:(%d+)'))
local limit = tonumber(string.match(memory, 'maxmemory:(%d+)'))
if used and limit and limit > 0 and used > limit * 0.8 then
  return { 'crowded', text(math.floor(100 * used / limit)) }
end
redis.call('HSET', KEYS[2], '0', ARGV[3])
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[3], '0', ARGV[4])
end
redis.call('HSET', KEYS[4], 'committed', ARGV[5])
redis.call('HSET', KEYS[1],
  'phase', 'open', 'reason', '', 'create_op', ARGV[1], 'op', ARGV[1], 'token', ARGV[6],
  'token_offered', '', 'fence', '0', 'nonce', '', 'replica', '', 'until', '0',
  'era', server_era(), 'settle_era', '', 'settle_until', '0', 'head', ARGV[2], 'index', '0',
  'committed', '0', 'open', '', 'opening_hash', ARGV[2], 'floor_hash', ARGV[2], 'records_first', '1',
  'window_floor', '1', 'pcm_floor', '1', 'bytes', text(#ARGV[3] + #ARGV[4]),
  'events_first', '1', 'events_last', '0', 'events_bytes', '0', 'voiced', '0', 'voice_turn', '',
  'voice_samples', '0', 'touched', text(now_ms()), 'retention', ARGV[7])
keep_expiry(ARGV[7], KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return { 'ok', '0' }
