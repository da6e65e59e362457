-- The fence without a lock. ARGV: run, token, and "first", "again", "later", or "raise" to make it the least. Answers what and
-- the token.
F = KEYS[1]
local t = tonumber(ARGV[2])
if ARGV[3] == 'raise' then
	raise(t)
	return {MINE, ARGV[2]}
end
local why, last = refusal(t, ARGV[3] ~= 'later')
if why then return {why, digits(last)} end
remember(t)
return {MINE, digits(t)}
