-- What the steps share. A step works on one name, whose keys are
--   H  holders: of a lock the string "token id holder", of a semaphore a sorted set, id by expiry
--   D  of a semaphore only: hash, id to "token holder"
--   F  fence: the last token
--   Q  queue: sorted set; of each waiter id and "id claim limit floor channel holder" by place, ".id" by expiry
-- While somebody may wait for a lock, a w stands in front of the fence and of the holder: so the fast steps need not look at
-- the queue. The w may stay for a while after the last waiter has gone, but is never missing.
-- Expiries in sorted sets are microseconds since 1970 of the server's clock; durations come in
-- milliseconds. No key outlives its latest entry.
--
-- A step reads from every key before it writes, so that a key of a foreign type fails it as a whole.
-- Redis checks for memory at the first write of a script only: steps that must work without memory
-- begin with a write that takes none.
local call = redis.call
local H, D, F, Q

-- Answers about an owner: a token, alone or with the milliseconds left, or one of these.
local HELD, WAITING, GONE = 0, 1, 2

local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- Lua's own conversion keeps 14 digits only.
local function digits(n) return string.format('%.0f', n) end

local wrote
local function write(...)
	local reply = call(...)
	wrote = true
	return reply
end

-- The text of an error.
local function reason(failure)
	if type(failure) == 'table' then failure = failure.err end
	failure = tostring(failure)
	return string.match(failure, '%u%u%u+ .*') or failure -- Redis 6 puts the place in front
end

-- Runs a step. If it fails before it wrote anything, it surely did not happen.
local function run(step, ...)
	wrote = false
	local ok, answer = pcall(step, ...)
	if ok then return answer end
	answer = reason(answer)
	if wrote then answer = 'FENCELOCKHALF ' .. answer end
	return {err = answer}
end

-- Changes an entry of a set of expiries, also without memory. To remove it first would do as well, but in a slot that is
-- on its way to another server a key that has become empty cannot be written any more.
local function renew(set, id, expiry)
	write('PEXPIREAT', set, digits(math.ceil(expiry / 1000)))
	write('ZADD', set, digits(expiry), id)
end

-- Lets the set of expiries, and what belongs to it, live as long as its latest entry.
local function keep(set, ...)
	local last = call('ZRANGE', set, -1, -1, 'WITHSCORES')[2]
	local at = digits(math.ceil(last / 1000))
	write('PEXPIREAT', set, at)
	for i = 1, select('#', ...) do write('PEXPIREAT', (select(i, ...)), at) end
end

local function expired(set)
	return call('ZRANGEBYSCORE', set, '-inf', digits(now))
end

local function forget(ids, hash, ...)
	for i = 1, #ids, 1000 do
		local to = math.min(i + 999, #ids)
		for k = 1, select('#', ...) do write('ZREM', (select(k, ...)), unpack(ids, i, to)) end
		write('HDEL', hash, unpack(ids, i, to))
	end
end

local mark, last
local function fence()
	mark, last = string.match(call('GET', F) or '0', '^(w?)(%d+)$')
	last = tonumber(last)
	if not last then error('FENCELOCK the key of a fence holds something else', 0) end
end

-- Tokens are kept for 48 h from now, or from themselves if they are ahead of the clock.
local function remember(token)
	local text = string.format('%016.0f', token)
	write('SET', F, mark .. text, 'PXAT', digits(math.ceil(math.max(now, token) / 1000) + 172800000))
	last = token
	return text
end

local function mint(floor)
	local token = math.max(last + 1, floor + 1, now)
	if token > 9007199254740991 then error('FENCELOCK the token would exceed 53 bits', 0) end
	return remember(token)
end

local function granted(token, left, asked)
	if left > asked then return {token, left} end
	return token
end
