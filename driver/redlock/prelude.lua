-- What the steps share. When the server is sent the text of a script there is one more argument, "run", by which it looks
-- whether it is the run of the server that is in the text: who knows the text's hash is then known to be that run.
--
-- A step works on one name, whose keys are
--   H  of a lock the string "token id holder", of a semaphore a sorted set, slot by expiry
--   D  of a semaphore only: hash, slot to "token id holder"
--   F  fence: the greatest token that was accepted
--   W  channels of clients that wait, a sorted set by expiry
-- Expiries in sorted sets are microseconds since 1970 of the server's clock; durations come in milliseconds.
local call = redis.call

-- What a node says to a proposal.
local MINE, OTHER, LOW, FAR = 1, 2, 3, 4
-- What a node says about a lease, besides MINE and OTHER.
local GONE = 5

if ARGV[#ARGV] == 'run' then
	ARGV[#ARGV] = nil
	if not string.find(call('INFO', 'server'), 'run_id:' .. RUN, 1, true) then
		return redis.error_reply('FENCELOCKRUN the server has restarted')
	end
end

local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]
local H, D, F, W

-- The parts of what is stored of a lease: token, id, holder.
local function parts(text) return string.match(text, '^(%d+) (%S+) (.*)$') end

-- Lua's own conversion keeps 14 digits only.
local function digits(n) return string.format('%.0f', n) end

-- The fence. A node without memory of the name takes for it what others may have been given until a second ago.
local function stored()
	local last = call('GET', F)
	if not last then return now - 1000000 end
	return tonumber(last) or error('the key of a fence holds something else')
end

local function remember(token)
	call('SET', F, digits(token), 'PX', digits(172800000 + math.max(0, math.ceil((token - now) / 1000))))
end

local function raise(token)
	if token > stored() or not call('GET', F) then remember(math.max(token, stored())) end
end

-- A proposal is made from a clock, which may be wrong, or only from what nodes have said. Answers why it is not accepted.
local function refusal(t, clocked)
	local last = stored()
	if t <= last then return LOW, last end
	if clocked and t > now + 60000000 then return FAR, math.max(last, now) end
end

-- Lets the client of a waiter be told when the name is free. If that cannot be kept, the waiter finds out by itself.
local function enlist(claim, channel)
	if claim == 0 then return end
	redis.pcall('ZADD', W, digits(now + claim * 1000), channel)
	local last = call('ZRANGE', W, -1, -1, 'WITHSCORES')[2]
	if last then call('PEXPIREAT', W, digits(math.ceil(last / 1000))) end
end

-- Tells the client that has asked longest ago: one is enough, and it asks to be told again if it is too late.
local function wake()
	call('ZREMRANGEBYSCORE', W, '-inf', digits(now))
	local channel = call('ZPOPMIN', W)[1]
	if channel then redis.pcall('PUBLISH', channel, H) end
end
