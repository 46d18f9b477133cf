#!lua name=midstream_log_2

-- The writes of the log, each one atomic. A changed meaning is a library with a new number, so that old and
-- new processes can share one server.
--
-- KEYS of one cluster share a hash tag. meta is a hash: generation, run_id (of the server that generation was
-- opened on), committed. A generation counts as open only on that very server run: a restart, a rewind, a flush
-- or a fail-over all end it, and no write lands in a log that may have lost its end.
--
-- A generation's number is the server's time in milliseconds when it was opened, or one more than the number before
-- if that is higher. So a server that forgot its numbers gives no number twice (docs/decisions/0002). Lua's numbers
-- are doubles, exact for these; they are written by `digits`, never with an exponent.
--
-- `known` is the highest generation the client has seen; `wanted` the one it insists on, or 0.

local function digits(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function run_id()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
end

local function stored_generation(meta)
  return tonumber(redis.call('HGET', meta, 'generation') or '0')
end

local function open_generation_here(meta)
  local generation = stored_generation(meta)
  if generation > 0 and redis.call('HGET', meta, 'run_id') == run_id() then
    return generation
  end
  return 0
end

local function entry_id(generation)
  return digits(generation) .. '-*'
end

local function last_id(facts)
  if redis.call('EXISTS', facts) == 0 then
    return '0-0'
  end
  local stream = redis.call('XINFO', 'STREAM', facts)
  for i = 1, #stream, 2 do
    if stream[i] == 'last-generated-id' then
      return stream[i + 1]
    end
  end
end

local function generation_of(id)
  return tonumber(string.match(id, '^(%d+)-'))
end

local function refusal(meta, known, wanted)
  local open = open_generation_here(meta)
  if open == 0 or open < known then
    return { 'STALE', digits(stored_generation(meta)) }
  end
  if wanted > 0 and wanted ~= open then
    return { 'CHANGED', digits(open) }
  end
end

-- KEYS facts meta; ARGV known wanted fact...
local function append(keys, args)
  local refused = refusal(keys[2], tonumber(args[1]), tonumber(args[2]))
  if refused then
    return refused
  end
  local id = entry_id(stored_generation(keys[2]))
  local last
  for i = 3, #args do
    last = redis.call('XADD', keys[1], id, 'd', args[i])
  end
  return { 'OK', last }
end

-- KEYS facts meta command-stream...; ARGV known wanted after facts-count fact... command...
-- The i-th command goes to the i-th command stream.
local function commit(keys, args)
  local refused = refusal(keys[2], tonumber(args[1]), tonumber(args[2]))
  if refused then
    return refused
  end
  local committed = redis.call('HGET', keys[2], 'committed')
  if committed ~= args[3] then
    return { 'CONFLICT', committed }
  end
  local id = entry_id(stored_generation(keys[2]))
  local facts_count = tonumber(args[4])
  local last
  for i = 5, 4 + facts_count do
    last = redis.call('XADD', keys[1], id, 'd', args[i])
  end
  for i = 3, #keys do
    redis.call('XADD', keys[i], id, 'd', args[2 + facts_count + i])
  end
  redis.call('HSET', keys[2], 'committed', last)
  return { 'OK', last }
end

-- KEYS facts meta; ARGV above cause opened_by (both as JSON strings)
local function open_generation(keys, args)
  local above = tonumber(args[1])
  local open = open_generation_here(keys[2])
  if open > above then
    return { 'OK', digits(open) }
  end
  local before = math.max(stored_generation(keys[2]), generation_of(last_id(keys[1])), above)
  local at_ms = now_ms()
  local generation = math.max(before + 1, at_ms)
  local number = digits(generation)
  redis.call('HSET', keys[2], 'generation', number, 'run_id', run_id(), 'committed', '0-0')
  redis.call('XADD', keys[1], entry_id(generation), 'd',
    '{"kind":"GenerationOpened","version":1,"source":"log","incarnation":' .. number ..
    ',"source_seq":1,"at_ms":' .. digits(at_ms) .. ',"payload":{"generation":' .. number ..
    ',"cause":' .. args[2] .. ',"opened_by":' .. args[3] .. '}}')
  return { 'OK', number }
end

-- KEYS facts meta. Answers {open generation or '0', first entry's id or '', last id, committed}.
local function tail(keys)
  local first = redis.call('XRANGE', keys[1], '-', '+', 'COUNT', 1)
  return {
    digits(open_generation_here(keys[2])),
    first[1] and first[1][1] or '',
    last_id(keys[1]),
    redis.call('HGET', keys[2], 'committed') or '0-0',
  }
end

-- KEYS snapshot; ARGV generation seq state
local function save_snapshot(keys, args)
  local generation, seq = string.match(redis.call('HGET', keys[1], 'position') or '0-0', '^(%d+)-(%d+)$')
  generation, seq = tonumber(generation), tonumber(seq)
  local new_generation, new_seq = tonumber(args[1]), tonumber(args[2])
  if new_generation < generation or (new_generation == generation and new_seq <= seq) then
    return 0
  end
  redis.call('HSET', keys[1], 'position', args[1] .. '-' .. args[2], 'state', args[3])
  return 1
end

redis.register_function('midstream_append_2', append)
redis.register_function('midstream_commit_2', commit)
redis.register_function('midstream_open_generation_2', open_generation)
redis.register_function('midstream_save_snapshot_2', save_snapshot)
redis.register_function { function_name = 'midstream_tail_2', callback = tail, flags = { 'no-writes' } }
