-- The fence without a lock. ARGV: token, and "first", "again", "later", or "raise" to make it the least. Answers what and
-- the token.
F = KEYS[1]
local t = tonumber(ARGV[1])
if ARGV[2] == 'raise' then
	raise(t)
	return {MINE, ARGV[1]}
end
local why, last = refusal(t, ARGV[2] ~= 'later')
if why then return {why, digits(last)} end
remember(t)
return {MINE, digits(t)}
