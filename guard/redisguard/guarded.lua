-- Runs what follows only if the token is not lower than the mark. The last key is the mark's, the last argument the
-- token; the script behind sees neither. Tokens are of 16 digits, so that texts compare as numbers do.
local mark, token = KEYS[#KEYS], ARGV[#ARGV]
KEYS[#KEYS], ARGV[#ARGV] = nil, nil
local highest = redis.call('GET', mark)
if highest and not string.find(highest, '^%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d$') then
	return {err = 'FENCELOCKGUARD the key of a mark holds something else'}
end
if highest and highest > token then
	return {err = 'FENCELOCKSTALE a higher token was admitted'}
end
if highest ~= token then
	redis.call('SET', mark, token)
end
