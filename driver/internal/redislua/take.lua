-- What happens with a grant to who asked: nothing more.

local function take(id, ttl, floor, about)
	local token = mint(floor)
	put(id, token, ttl, about)
	return token
end
