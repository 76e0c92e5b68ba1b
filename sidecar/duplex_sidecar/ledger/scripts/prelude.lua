-- Put in front of every script by the loader. KEYS[1] is always the session's meta hash; owners'
-- scripts have ARGV[1] = fence, ARGV[2] = nonce, ARGV[3] = operation id.
-- In every script: all checks, then writes (the first one deny-oom), meta, and trims last. A key of
-- a foreign type fails before meta moves, so nothing that counts has happened.

-- tostring() of milliseconds or microseconds since 1970 loses digits.
local function text(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

-- Changes with a failover and a restart.
local function server_era()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
end

-- Whether one call was made before another, both as '<clock> <microseconds>'; where they name two
-- clocks nobody can tell.
local function made_before(call, other)
  local clock, at = string.match(call, '^(.*) (%d+)$')
  local others, since = string.match(other, '^(.*) (%d+)$')
  return clock ~= nil and clock == others and tonumber(at) < tonumber(since)
end

local FIELDS = {
  'phase', 'fence', 'nonce', 'replica', 'until', 'era', 'head', 'index', 'committed', 'open', 'op',
  'bytes', 'records_first', 'window_floor', 'pcm_floor', 'reason',
}

local function read_meta()
  local values = redis.call('HMGET', KEYS[1], unpack(FIELDS))
  local meta = {}
  for i, name in ipairs(FIELDS) do
    meta[name] = values[i]
  end
  return meta
end

local function refuse_without_session(meta)
  if not meta.phase then
    return { 'unknown' }
  end
  if meta.phase == 'erased' then
    return { 'erased' }
  end
end

local function refuse_others(meta)
  local refusal = refuse_without_session(meta)
  if refusal then
    return refusal
  end
  if meta.fence ~= ARGV[1] or meta.nonce ~= ARGV[2] then
    return { 'lost', meta.fence, meta.replica }
  end
end

local function head_seen(meta)
  return { 'head', meta.index, meta.head, meta.committed, meta.open }
end

-- Renewal refreshes the expiry of all keys; a key written for the first time gets its own here.
local function keep_expiry(retention_ms, ...)
  for _, key in ipairs({ ... }) do
    if redis.call('PTTL', key) == -1 then
      redis.call('PEXPIRE', key, retention_ms)
    end
  end
end

-- Drops the blobs of units [from, below) of one hash; returns the bytes freed.
local function trim_units(key, from, below)
  local freed = 0
  for seq = from, below - 1 do
    local field = text(seq)
    local size = redis.call('HSTRLEN', key, field)
    if size > 0 then
      freed = freed + size
      redis.call('HDEL', key, field)
    end
  end
  return freed
end

-- The events ARGV[from], ... become the journal's newest. Returns its last number and its bytes.
local function append_events(events, order, last, bytes, from)
  local now = text(now_ms())
  for i = from, #ARGV do
    last, bytes = last + 1, bytes + #ARGV[i]
    redis.call('HSET', events, text(last), ARGV[i])
    redis.call('RPUSH', order, now .. ' ' .. text(#ARGV[i]))
  end
  return last, bytes
end

-- Drops the oldest events as long as goes(number, bytes, at_ms) says so. Returns the journal's
-- first number and its bytes.
local function trim_events(events, order, first, last, bytes, goes)
  while first <= last do
    local at, size = string.match(redis.call('LINDEX', order, 0), '^(%d+) (%d+)$')
    if not goes(first, bytes, tonumber(at)) then
      break
    end
    redis.call('LPOP', order)
    redis.call('HDEL', events, text(first))
    first, bytes = first + 1, bytes - tonumber(size)
  end
  return first, bytes
end
