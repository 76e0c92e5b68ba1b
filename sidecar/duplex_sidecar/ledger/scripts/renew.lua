#!lua flags=allow-oom
-- Extends the lease of its recorded owner, also one that expired and that nobody took. Refreshes
-- the expiry of all keys once a minute, or twice in a retention that is shorter. The era stays that
-- of the acquisition: whoever comes next has to step over the fences of owners that this server may
-- have missed.
-- KEYS all, meta first
-- ARGV fence nonce lease_ms
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
local now = now_ms()
redis.call('HSET', KEYS[1], 'until', text(now + tonumber(ARGV[3])))
local kept = redis.call('HMGET', KEYS[1], 'touched', 'retention')
if now - tonumber(kept[1]) >= math.min(60000, tonumber(kept[2]) / 2) then
  redis.call('HSET', KEYS[1], 'touched', text(now))
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, kept[2])
  end
end
return { 'ok' }
