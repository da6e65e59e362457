-- Ends all leases and answers how many there were. ARGV: nothing that is read.
at(0)
return run(function()
	begin()
	local ended = count()
	clear()
	serve()
	return ended
end)
