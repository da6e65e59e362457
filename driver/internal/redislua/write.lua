-- What happens with a grant to who asked: asked, a function made of the user's script, is called first, so that no lock is
-- left if it fails. Its keys are those behind the lock's, its arguments those behind the lock's and then the token.

local function take(id, ttl, floor, about)
	local token = mint(floor)
	local keys, args = {}, {}
	for i = 4, #KEYS do keys[i - 3] = KEYS[i] end
	for i = 5, #ARGV do args[i - 4] = ARGV[i] end
	args[#args + 1] = token
	local ok, answer = pcall(asked, keys, args)
	if not ok or type(answer) == 'table' and answer.err then
		return {err = 'FENCELOCKWRITE ' .. reason(answer)}
	end
	put(id, token, ttl, about)
	return token
end
