-- The fence without a lock. ARGV: floor, and "next" to mint a token or "raise" to raise the last one.
F = KEYS[1]
return run(function()
	fence()
	if ARGV[2] == 'next' then return mint(ARGV[1]) end
	local floor = tonumber(ARGV[1])
	if floor > last then remember(floor) end
	return HELD
end)
