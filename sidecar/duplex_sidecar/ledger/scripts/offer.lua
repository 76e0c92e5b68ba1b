#!lua flags=allow-oom
-- A replica that has made itself ready says under which fence and nonce it would own the session, and
-- for how long that holds. It changes nothing for the present owner, who alone can hand over. A repeat
-- prolongs it, lifetime 0 takes it back. A larger fence replaces a smaller one; one that was issued to
-- this very replica is its own still, and its newer nonce counts (the older one's caller gave up).
-- KEYS meta
-- ARGV fence nonce replica address lifetime_ms asked ("clock microseconds")
local meta = read_meta()
local refusal = refuse_without_session(meta)
if refusal then
  return refusal
end
if meta.phase == 'ended' then
  return { 'ended', meta.reason }
end
if tonumber(ARGV[1]) <= tonumber(meta.fence) then
  return { 'stale', meta.fence }
end
local offered = redis.call('HMGET', KEYS[1], 'next_fence', 'next_replica', 'next_nonce',
  'next_asked')
local recorded = tonumber(offered[1] or '0')
local other = recorded == tonumber(ARGV[1]) and offered[2] ~= ARGV[3]
local late = recorded == tonumber(ARGV[1]) and made_before(ARGV[6], offered[4] or '')
if recorded > tonumber(ARGV[1]) or other or late then
  return { 'stale', offered[1] }
end
if meta.phase ~= 'open' or meta.nonce == '' or meta.replica == ARGV[3] then
  return { 'unoffered', 'nobody else runs the session' }
end
if ARGV[5] == '0' and offered[3] ~= ARGV[2] then
  return { 'ok' }
end
redis.call('HSET', KEYS[1], 'next_fence', ARGV[1], 'next_nonce', ARGV[2], 'next_replica', ARGV[3],
  'next_address', ARGV[4], 'next_until', text(now_ms() + tonumber(ARGV[5])),
  'next_asked', ARGV[6])
return { 'ok' }
