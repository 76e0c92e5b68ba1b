#!lua flags=allow-oom
-- Proof of death: ends the lease of a replica that is known to be gone. Its nonce goes too, so a
-- wrong proof costs that replica the session and nothing else. With a nonce it ends that one lease
-- of a replica that lives: late, it finds another one and leaves it alone.
-- KEYS meta
-- ARGV replica nonce ("" = any)
local meta = read_meta()
local refusal = refuse_without_session(meta)
if refusal then
  return refusal
end
local other = ARGV[2] ~= '' and meta.nonce ~= ARGV[2]
if meta.nonce == '' or meta.replica ~= ARGV[1] or other then
  return { 'ok', '0' }
end
redis.call('HSET', KEYS[1], 'nonce', '', 'replica', '', 'address', '', 'until', '0')
return { 'ok', '1' }
