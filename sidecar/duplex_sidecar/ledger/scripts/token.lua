-- Resume tokens: the owner offers a new one, then confirms it at the first message under it.
-- KEYS meta
-- ARGV fence nonce action ("offer" or "confirm") token_sha256
local meta = read_meta()
local refusal = refuse_others(meta)
if refusal then
  return refusal
end
if ARGV[3] == 'offer' then
  redis.call('HSET', KEYS[1], 'token_offered', ARGV[4])
  return { 'ok' }
end
local tokens = redis.call('HMGET', KEYS[1], 'token', 'token_offered')
if tokens[1] == ARGV[4] then
  return { 'ok' }
end
if tokens[2] ~= ARGV[4] then
  return { 'token' }
end
redis.call('HSET', KEYS[1], 'token', ARGV[4], 'token_offered', '')
return { 'ok' }
