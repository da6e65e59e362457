package conformance_test

var variants = []variant{
	// The state of one name, as drivers keep it.
	{name: "release does not compare the owner", caught: []string{"Ownership/StepIgnoresForeignOwner"}},
	{name: "extend does not compare the owner", caught: []string{"Ownership/StepIgnoresForeignOwner"}},
	{name: "extend brings a lost lease back", caught: []string{"Expiry/StepExtendBringsNobodyBack"}},
	{name: "a repeated acquire is refused", caught: []string{"LostReply/StepLockIsRepeatable"}},
	{name: "a repeated acquire gets a new token", caught: []string{"LostReply/StepLockIsRepeatable"}},
	{name: "a repeated acquire takes a second permit", caught: []string{"Semaphore/StepRepeatTakesNoSecondPermit"}},
	{name: "a repeated acquire does not renew", caught: []string{"Expiry/StepRepeatRenews"}},
	{name: "a repeated enqueue loses its place", caught: []string{"LostReply/StepEnqueueIsRepeatable"}},
	{name: "the token is the clock alone", caught: []string{"Fencing/StepFloor"}},
	{name: "the token ignores the clock", caught: []string{"Fencing/StepTokensAreNearTheClock"}},
	{name: "the token ignores the floor", caught: []string{"Fencing/StepFloor"}},
	{name: "a release resets the memory of tokens", caught: []string{"Fencing/StepNothingForgetsTokens"}},
	{name: "an expiry resets the memory of tokens", caught: []string{"Fencing/StepNothingForgetsTokens"}},
	{name: "force-unlock resets the memory of tokens", caught: []string{"Fencing/StepNothingForgetsTokens"}},
	{name: "idle names are forgotten with their tokens", caught: []string{"Fencing/StepNothingForgetsTokens"}},
	{name: "advance lowers", caught: []string{"Fencing/StepAdvance"}},
	{name: "the granted TTL is overstated", caught: []string{"Expiry/BeliefEndsBeforeTheLease"}},
	{name: "leases end too early", caught: []string{"Expiry/BeliefEndsBeforeTheLease"}},
	{name: "leases never end", caught: []string{"Expiry/DeadHolderIsSucceeded"}},
	{name: "waiters never end", caught: []string{"Waiting/StepDeadHeadIsPassed"}},
	{name: "an extension shortens", caught: []string{"Expiry/StepExtendNeverShortens"}},
	{name: "an extension does nothing", caught: []string{"Renewal/HoldsBeyondTTL"}},
	{name: "try passes a live waiter", caught: []string{"Semaphore/StepHeadIsJudgedByItsLimit"}},
	{name: "the limit of the one who asks is used for the head", caught: []string{"Semaphore/StepHeadIsJudgedByItsLimit"}},
	{name: "one too many is let in", caught: []string{"Exclusion/StepRefusesRival", "Semaphore/StepBound", "Concurrency/Quiet"}},
	{name: "a waiter that is refused does not queue", caught: []string{"Waiting/StepOrder"}},
	{name: "a try queues", caught: []string{"Exclusion/StepRefusesRival"}},
	{name: "release frees and hands over to nobody", caught: []string{"Waiting/StepPushesTheGrant"}},
	{name: "release serves only one", caught: []string{"Semaphore/StepReleaseServesAllItCan"}},
	{name: "release drops the queue", caught: []string{"Waiting/StepOrder"}},
	{name: "release of one permit frees all", caught: []string{"Semaphore/StepBound"}},
	{name: "release leaves the waiter in the queue", caught: []string{"Waiting/StepWaiterLeaves"}},
	{name: "release says it found what was not there", caught: []string{"Release/StepReleasesOnce"}},
	{name: "release says it found nothing", caught: []string{"Release/StepReleasesOnce"}},
	{name: "a poll brings a lost entry back", caught: []string{"Waiting/StepPollCreatesNothing"}},
	{name: "a poll does not renew the entry", caught: []string{"Waiting/StepPollKeepsThePlace"}},
	{name: "a poll does not serve the queue", caught: []string{"Waiting/StepExpiryServesTheHead"}},
	{name: "a grant to a waiter is a lease that is far too long", caught: []string{"Waiting/StepGrantIsAClaim"}},
	{name: "the last in the queue is served first", caught: []string{"Waiting/StepOrder"}},
	{name: "a limit that was lowered evicts holders", caught: []string{"Semaphore/LoweredLimitDrains"}},
	{name: "names are never forgotten", caught: []string{"Leaks/MemoryOfNames"}},
	{name: "expired leases are listed", caught: []string{"Inspect/StepListsWhatLives"}},

	// The driver.
	{name: "all of a client share one owner id", caught: []string{"Exclusion/SameClientIsRefused"}},
	{name: "a client's clock judges its permits", caught: []string{"Exclusion/RivalIsRefused/Permit"}},
	{name: "kinds are not kept apart", caught: []string{"Exclusion/KindsAreApart"}},
	{name: "long names are cut", caught: []string{"Limits/StepNamesAreApart"}},
	{name: "pushes are lost and polls see no grant", caught: []string{"Waiting/PushIsLost"}},
	{name: "pushes are lost", caught: []string{"Waiting/StepPushesTheGrant"}},
	{name: "pushes go to the wrong owner", caught: []string{"Waiting/StepPushesTheGrant"}},
	{name: "contention is reported as unavailable", caught: []string{"Exclusion/RivalIsRefused"}},
	{name: "unavailable is reported as contention", caught: []string{"Limits/ClosedDriver"}},
	{name: "a cancelled step is executed and called unavailable", caught: []string{"Cancellation/StepOnEndedContext"}},

	// The engine.
	{name: "V counts from the reply to an acquire", caught: []string{"Renewal/ValidityCountsFromSending"}},
	{name: "V counts from the reply to an extension", caught: []string{"Renewal/ValidityCountsFromSending"}},
	{name: "V counts from the reply to a poll", caught: []string{"Validity/LateReplyToPoll"}},
	{name: "V of a claim counts from the push", caught: []string{"Validity/LatePush"}},
	{name: "V has no margin", caught: []string{"Concurrency/Quiet"}},
	{name: "an extension shortens V", caught: []string{"Validity/LateReplyShortensNothing"}},
	{name: "loss waits for the answer to an extension", caught: []string{"Loss/ErrReadsTheClock"}},
	{name: "loss is seen by Done only", caught: []string{"Loss/ErrReadsTheClock"}},
	{name: "one extension that fails is a loss", caught: []string{"Renewal/FailureIsRetried"}},
	{name: "an extension that fails is not repeated", caught: []string{"Renewal/FailureIsRetried"}},
	{name: "an answer that comes after V revives", caught: []string{"Loss/LateReplyRevivesNobody"}},
	{name: "a terminal answer is ignored", caught: []string{"Loss/TakenAwayIsTold"}},
	{name: "release uses the caller's context", caught: []string{"Release/OnCancelledContext"}},
	{name: "release asks the server after a loss", caught: []string{"Loss/ReleaseAfterLossIsQuick"}},
	{name: "release reports every outcome as nil", caught: []string{"Release/ReplyLost"}},
	{name: "renewal goes on until release succeeds", caught: []string{"Renewal/EndsAtCallOfRelease"}},
	{name: "belief ends when release returns", caught: []string{"Release/BeliefEndsBeforeItIsSent"}},
	{name: "a failed acquire is not undone", caught: []string{"LostReply/Lock"}},
	{name: "a late grant is not undone", caught: []string{"Cancellation/DuringLateRequest"}},
	{name: "a cancelled wait is not undone", caught: []string{"Cancellation/EndsWait"}},
	{name: "what cannot be undone is not tried again", caught: []string{"LostReply/CompensationIsRepeated"}},
	{name: "a lost lease is not given back", caught: []string{"Loss/LostLeaseIsGivenBack"}},
	{name: "the context of Lock ends the lease", caught: []string{"Cancellation/LeaseOutlivesContext"}},
	{name: "a timeout is called unavailable", caught: []string{"LostReply/ErrorsAreDistinct"}},
	{name: "a refusal is called uncertain", caught: []string{"LostReply/ErrorsAreDistinct"}},
	{name: "the holder's id is the server's", caught: []string{"Reentrancy/ExcludesOthers"}},
	{name: "MaxHold is ignored", caught: []string{"Renewal/MaxHoldEnds"}},
	{name: "a recheck is ignored", caught: []string{"Waiting/RecheckAsksAtOnce"}},
	{name: "waiters of one client all ask", caught: []string{"Waiting/FirstInLineAsks"}},
	{name: "close leaves leases believed", caught: []string{"Limits/CloseEndsBelief"}},
	{name: "polls go one by one", caught: []string{"Cost/RestWaiting"}},
	{name: "extensions go one by one", caught: []string{"Cost/RestHolding"}},
	{name: "Do releases not on a panic", caught: []string{"Do/PanicReleases"}},
	{name: "Do hides a loss", caught: []string{"Do/LossIsAnError"}},
	{name: "Do hides what fn returned", caught: []string{"Do/ErrorsAreJoined"}},
	{name: "LockAll takes names in the order given", caught: []string{"LockAll/OrderPreventsDeadlock"}},
	{name: "LockAll keeps what it has when it fails", caught: []string{"LockAll/AllOrNone"}},
	{name: "LockAll does not see a loss while it waits", caught: []string{"LockAll/LossEndsWait"}},
	{name: "a NoRenew claim is not extended", caught: []string{"Waiting/WinnerWithoutRenewal"}},
}

var edits = []edit{
	{stateFile,
		`n.Holders = slices.DeleteFunc(n.Holders, func(h Holder) bool { return h.ID == id })
	n.Queue = slices.DeleteFunc(n.Queue, func(w Waiter) bool { return w.ID == id })
	found := len(n.Holders)+len(n.Queue) < before
	return found, n.serve(now)`,
		`n.Holders = slices.DeleteFunc(n.Holders, func(h Holder) bool {
		return h.ID == id || broken("release does not compare the owner") ||
			len(n.Holders) > 1 && broken("release of one permit frees all")
	})
	n.Queue = slices.DeleteFunc(n.Queue, func(w Waiter) bool {
		return w.ID == id && !broken("release leaves the waiter in the queue") || broken("release drops the queue")
	})
	found := len(n.Holders)+len(n.Queue) < before
	if broken("release says it found what was not there") {
		found = true
	}
	if broken("release says it found nothing") {
		found = false
	}
	if broken("a release resets the memory of tokens") {
		n.Last = 0
	}
	if broken("release frees and hands over to nobody") {
		return found, nil
	}
	if broken("release serves only one") && len(n.Queue) > 1 {
		rest := n.Queue[1:]
		n.Queue = n.Queue[:1:1]
		grants := n.serve(now)
		n.Queue = append(n.Queue, rest...)
		return found, grants
	}
	return found, n.serve(now)`},
	{stateFile,
		`a, _ := n.renew(now, id, ttl)
	return a`,
		`if broken("an extension does nothing") {
		ttl = 0
	}
	if len(n.Holders) > 0 && broken("extend does not compare the owner") {
		id = n.Holders[0].ID
	}
	a, ok := n.renew(now, id, ttl)
	if broken("an extension does nothing") {
		a.TTL = ttl
	}
	if !ok && len(n.Holders) == 0 && broken("extend brings a lost lease back") {
		n.Holders = append(n.Holders, Holder{ID: id, Token: n.Last, Expires: now.plus(ttl)})
		a, _ = n.renew(now, id, ttl)
	}
	return a`},
	{stateFile,
		`grants := n.serve(now)
	if a, ok := n.renew(now, r.ID, r.TTL); ok {
		return a, without(grants, r.ID)
	}
	if w := n.waiter(r.ID); w != nil {
		w.Expires = now.plus(r.Claim)
		return driver.Answer{State: driver.Waiting}, grants
	}
	if len(n.Queue) == 0 && len(n.Holders) < r.Limit {`,
		`n.expire(now)
	if len(n.Queue) > 0 && broken("the limit of the one who asks is used for the head") {
		n.Queue[0].Limit = max(n.Queue[0].Limit, r.Limit)
	}
	if len(n.Holders) > r.Limit && broken("a limit that was lowered evicts holders") {
		n.Holders = n.Holders[len(n.Holders)-r.Limit:]
	}
	grants := n.serve(now)
	renewal := r.TTL
	if broken("a repeated acquire does not renew") {
		renewal = 0
	}
	if a, ok := n.renew(now, r.ID, renewal); ok && !(r.Limit == 1 && broken("a repeated acquire is refused")) &&
		!(r.Limit > 1 && broken("a repeated acquire takes a second permit")) {
		if broken("a repeated acquire gets a new token") {
			a.Token = n.mint(now, r.Floor)
		}
		return a, without(grants, r.ID)
	}
	if w := n.waiter(r.ID); w != nil {
		w.Expires = now.plus(r.Claim)
		if broken("a repeated enqueue loses its place") {
			again := *w
			n.Queue = append(slices.DeleteFunc(n.Queue, func(w Waiter) bool { return w.ID == r.ID }), again)
		}
		return driver.Answer{State: driver.Waiting}, grants
	}
	limit := r.Limit
	if broken("one too many is let in") {
		limit++
	}
	if broken("a try queues") {
		r.Wait, r.Claim = true, max(r.Claim, r.TTL)
	}
	if broken("a waiter that is refused does not queue") {
		r.Wait = false
	}
	if (len(n.Queue) == 0 || !r.Wait && broken("try passes a live waiter")) && len(n.Holders) < limit {`},
	{stateFile,
		`n.Last = max(n.Last+1, floor+1, driver.Token(max(now.Token, 0)))
	return n.Last`,
		`if broken("the token ignores the clock") {
		now.Token = 0
	}
	if broken("the token ignores the floor") {
		floor = 0
	}
	if broken("the token is the clock alone") {
		return driver.Token(now.Token)
	}
	n.Last = max(n.Last+1, floor+1, driver.Token(max(now.Token, 0)))
	return n.Last`},
	{stateFile,
		`h.Expires = max(h.Expires, now.plus(ttl))
			left := time.Duration(h.Expires - now.Lease)`,
		`h.Expires = max(h.Expires, now.plus(ttl))
			if broken("an extension shortens") {
				h.Expires = now.plus(ttl)
			}
			left := time.Duration(h.Expires - now.Lease)
			if broken("the granted TTL is overstated") {
				left *= 2
			}`},
	{stateFile,
		`return driver.Answer{State: driver.Granted, Token: t, TTL: r.TTL}, grants`,
		`if broken("the granted TTL is overstated") {
			r.TTL *= 2
		}
		return driver.Answer{State: driver.Granted, Token: t, TTL: r.TTL}, grants`},
	{stateFile,
		`n.Holders = slices.DeleteFunc(n.Holders, func(h Holder) bool { return h.Expires <= now.Lease })
	n.Queue = slices.DeleteFunc(n.Queue, func(w Waiter) bool { return w.Expires <= now.Lease })`,
		`held := len(n.Holders)
	n.Holders = slices.DeleteFunc(n.Holders, func(h Holder) bool {
		early := 0 * time.Second
		if broken("leases end too early") {
			early = 150 * time.Millisecond
		}
		return h.Expires <= now.plus(early) && !broken("leases never end")
	})
	if len(n.Holders) < held && broken("an expiry resets the memory of tokens") {
		n.Last = 0
	}
	n.Queue = slices.DeleteFunc(n.Queue, func(w Waiter) bool {
		return w.Expires <= now.Lease && !broken("waiters never end")
	})`},
	{stateFile,
		`w := n.Queue[0]
		n.Queue = slices.Delete(n.Queue, 0, 1)
		t := n.mint(now, w.Floor)`,
		`at := 0
		if broken("the last in the queue is served first") {
			at = len(n.Queue) - 1
		}
		w := n.Queue[at]
		n.Queue = slices.Delete(n.Queue, at, at+1)
		if broken("a grant to a waiter is a lease that is far too long") {
			w.Claim *= 20
		}
		t := n.mint(now, w.Floor)`},
	{stateFile,
		`if w := n.waiter(p.ID); w != nil && w.Expires > now.Lease {
		w.Expires = now.plus(p.Claim)
	}
	grants := n.serve(now)
	if a, ok := n.renew(now, p.ID, p.TTL); ok {
		return a, without(grants, p.ID)
	}`,
		`if w := n.waiter(p.ID); w != nil && w.Expires > now.Lease && !broken("a poll does not renew the entry") {
		w.Expires = now.plus(p.Claim)
	}
	if broken("pushes are lost and polls see no grant") {
		return driver.Answer{State: driver.Waiting}, nil
	}
	var grants []Grant
	if !broken("a poll does not serve the queue") {
		grants = n.serve(now)
	}
	if a, ok := n.renew(now, p.ID, p.TTL); ok {
		return a, without(grants, p.ID)
	}
	if n.waiter(p.ID) == nil && broken("a poll brings a lost entry back") {
		n.Queue = append(n.Queue, Waiter{ID: p.ID, Limit: 1, Claim: p.Claim, Expires: now.plus(p.Claim)})
	}`},
	{stateFile,
		`n.Last = max(n.Last, floor) }`,
		`n.Last = max(n.Last, floor)
	if broken("advance lowers") {
		n.Last = floor
	}
}`},
	{stateFile,
		`n.Holders = nil
	return ended`,
		`n.Holders = nil
	if broken("force-unlock resets the memory of tokens") {
		n.Last = 0
	}
	return ended`},
	{stateFile,
		`func (n *Name) Live(now Now) []Holder {
	n.expire(now)`,
		`func (n *Name) Live(now Now) []Holder {
	if !broken("expired leases are listed") {
		n.expire(now)
	}`},

	{memoryFile,
		`	now := s.now()
	st := s.names[n]`,
		`	now := s.now()
	if n.Kind == driver.KindPermit && broken("a client's clock judges its permits") && d.id > "1" {
		now.Lease += int64(time.Hour)
	}
	if broken("kinds are not kept apart") {
		n.Kind = driver.KindLock
	}
	if broken("long names are cut") {
		n.Name = n.Name[:min(len(n.Name), 255)]
	}
	st := s.names[n]`},
	{memoryFile,
		`to := s.driver[g.Client]; to != nil && to.sink != nil {`,
		`to := s.driver[g.Client]; to != nil && to.sink != nil &&
			!broken("pushes are lost and polls see no grant") && !broken("pushes are lost") {
			if broken("pushes go to the wrong owner") {
				g.ID += "X"
			}`},
	{memoryFile,
		`return st.Last < driver.Token(now.Token) && st.Idle(now)`,
		`if broken("idle names are forgotten with their tokens") {
		return st.Idle(now)
	}
	return st.Last < driver.Token(now.Token) && st.Idle(now) && !broken("names are never forgotten")`},
	{memoryFile,
		`	if err := ctx.Err(); err != nil {
		return driver.Unavailable(err)
	}
	type push struct {`,
		`	if err := ctx.Err(); err != nil && !broken("a cancelled step is executed and called unavailable") {
		return driver.Unavailable(err)
	}
	type push struct {`},
	{memoryFile,
		`		a, g = s.Lock(now, r, d.id)
		return g
	})
	return a, err`,
		`		r.Owner = d.owner(r.Owner)
		a, g = s.Lock(now, r, d.id)
		return g
	})
	if ctx.Err() != nil && broken("a cancelled step is executed and called unavailable") {
		return driver.Answer{}, driver.Unavailable(ctx.Err())
	}
	if a.State == driver.Held && broken("contention is reported as unavailable") {
		return a, errClosed
	}
	if err != nil && broken("unavailable is reported as contention") {
		return driver.Answer{State: driver.Held}, nil
	}
	return a, err`},
	{memoryFile,
		`// Extend implements driver.Locker.
`,
		`func (d *Driver) owner(o driver.Owner) driver.Owner {
	if broken("all of a client share one owner id") {
		o.ID = d.id
	}
	return o
}

// Extend implements driver.Locker.
`},
	{memoryFile,
		`results[i].Answer = s.Extend(now, e.ID, e.TTL)`,
		`results[i].Answer = s.Extend(now, d.owner(e.Owner).ID, e.TTL)`},
	{memoryFile,
		`found, g = s.Release(now, o.ID)`,
		`found, g = s.Release(now, d.owner(o).ID)`},
	{memoryFile,
		`results[i].Answer, g = s.Poll(now, w)`,
		`w.Owner = d.owner(w.Owner)
			results[i].Answer, g = s.Poll(now, w)`},

	{waitFile,
		`return c.taken(ctx, a, w, validUntil(sent, answer.TTL), sent, answer.Token, 0)`,
		`if broken("V counts from the reply to an acquire") {
				sent = c.clock.Now()
			}
			return c.taken(ctx, a, w, validUntil(sent, answer.TTL), sent, answer.Token, 0)`},
	{waitFile,
		`		if !errors.Is(err, ErrUnavailable) && answer.State != driver.Held {`,
		`		if !errors.Is(err, ErrUnavailable) && answer.State != driver.Held && !broken("a late grant is not undone") {`},
	{waitFile,
		`		c.settle(c.discard(w))
	}
	return answer, sent, c.failure(`,
		`		if broken("a failed acquire is not undone") {
			c.forget(w)
		} else {
			c.settle(c.discard(w))
		}
	}
	return answer, sent, c.failure(`},
	{waitFile,
		`		c.reschedule(h)
		c.mu.Unlock()
		return &h.first, nil`,
		`		c.reschedule(h)
		c.mu.Unlock()
		if broken("the context of Lock ends the lease") {
			context.AfterFunc(ctx, func() {
				c.mu.Lock()
				after := c.end(h, ErrLost)
				c.mu.Unlock()
				after.run()
			})
		}
		return &h.first, nil`},
	{waitFile,
		`if a.cfg.maxHold > 0 && int64(a.cfg.maxHold) < never-h.granted {`,
		`if a.cfg.maxHold > 0 && !broken("MaxHold is ignored") {`},
	{waitFile,
		`owner: driver.Owner{Name: a.name, ID: rand.Text()},`,
		`owner: driver.Owner{Name: a.name, ID: ownerID(a)},`},
	{waitFile,
		`// forget takes the waiter out`,
		`func ownerID(a *attempt) string {
	if a.cfg.holder != "" && broken("the holder's id is the server's") {
		return (a.cfg.holder + "AAAAAAAAAAAAAAAAAAAAAAAAAA")[:26]
	}
	return rand.Text()
}

// forget takes the waiter out`},
	{waitFile,
		`w.sent, w.until = sent, validUntil(sent, a.TTL)`,
		`w.sent, w.until = sent, validUntil(sent, a.TTL)
		if broken("V counts from the reply to a poll") {
			w.until = validUntil(now, a.TTL)
		}`},
	{waitFile,
		`			if !c.settle(c.discard(w)) {
				e.Cause`,
		`			if broken("a cancelled wait is not undone") {
				c.forget(w)
			} else if !c.settle(c.discard(w)) {
				e.Cause`},
	{waitFile,
		`until := validUntil(w.sent, w.claim)
`,
		`until := validUntil(w.sent, w.claim)
	if broken("V of a claim counts from the push") {
		until = validUntil(now, w.claim)
	}
`},
	{waitFile,
		`	l := c.lines[a.name]
	if l == nil {`,
		`	l := c.lines[a.name]
	if l != nil && broken("waiters of one client all ask") {
		c.mu.Unlock()
		return &line{name: a.name, hinted: make(chan struct{}, 1)}, nil
	}
	if l == nil {`},
	{waitFile,
		`	if len(l.turns) == 0 {
		delete(c.lines, l.name)`,
		`	if c.lines[l.name] != l {
		return
	}
	if len(l.turns) == 0 {
		delete(c.lines, l.name)`},

	{leaseFile,
		`	if l.phase.Load() == leaseLive && h.c.clock.Now() < h.until.Load() {
		return nil
	}`,
		`	if l.phase.Load() == leaseLive && (h.c.clock.Now() < h.until.Load() ||
		broken("loss waits for the answer to an extension") || broken("loss is seen by Done only")) {
		return nil
	}`},
	{leaseFile,
		`	if !h.noRenew || h.claim > 0 {`,
		`	if !h.noRenew || h.claim > 0 && !broken("a NoRenew claim is not extended") {`},
	{leaseFile,
		`	case h.ended || c.clock.Now() >= h.until.Load():`,
		`	case (h.ended || c.clock.Now() >= h.until.Load()) && !broken("an answer that comes after V revives"):`},
	{leaseFile,
		`	case a.State != driver.Granted:
		after = c.end(`,
		`	case a.State != driver.Granted && broken("a terminal answer is ignored"):
	case a.State != driver.Granted:
		after = c.end(`},
	{leaseFile,
		`		h.claim = 0
		h.believe(max(h.until.Load(), validUntil(sent, a.TTL)))`,
		`		h.claim = 0
		h.first.phase.CompareAndSwap(leaseLost, leaseLive) // only if answers revive
		if broken("V counts from the reply to an extension") {
			sent = c.clock.Now()
		}
		h.believe(max(h.until.Load(), validUntil(sent, a.TTL)))
		if broken("an extension shortens V") {
			h.believe(validUntil(sent, a.TTL))
		}`},
	{leaseFile,
		`	c.clean(h.owner, now)
	return c.end(h, why)`,
		`	if !broken("a lost lease is not given back") {
		c.clean(h.owner, now)
	}
	return c.end(h, why)`},
	{leaseFile,
		`	case leaseLost:
		c.mu.Unlock()
		return c.ended("release", n, h.cause)`,
		`	case leaseLost:
		c.mu.Unlock()
		if broken("release asks the server after a loss") {
			_, _ = call(context.WithoutCancel(ctx), c, c.requestTimeout(h.ttl), func(ctx context.Context) (bool, error) {
				return c.d.Release(ctx, h.owner)
			}, nil)
		}
		return c.ended("release", n, h.cause)`},
	{leaseFile,
		`	repeated := l.unknown
	l.unknown, l.sending = true, make(chan struct{})
	if !c.closed { // Close waits for it
		c.calls.Add(1)
		defer c.calls.Done()
	}
	c.mu.Unlock()
	after.run()

	if ctx.Done() != nil {
		ctx = context.WithoutCancel(ctx)
	}
	found, err := call(ctx, c, c.requestTimeout(h.ttl), func(ctx context.Context) (bool, error) {
		return c.d.Release(ctx, h.owner)
	}, nil)`,
		`	repeated := l.unknown
	l.unknown, l.sending = true, make(chan struct{})
	if !c.closed { // Close waits for it
		c.calls.Add(1)
		defer c.calls.Done()
	}
	if broken("belief ends when release returns") {
		l.phase.Store(leaseLive)
		defer l.phase.Store(leaseReleased)
	}
	c.mu.Unlock()
	after.run()

	released := make(chan struct{})
	defer close(released)
	if broken("renewal goes on until release succeeds") {
		go func() {
			for {
				select {
				case <-released:
					return
				case <-time.After(h.ttl / 3):
					c.d.Extend(context.Background(), []driver.Extension{{Owner: h.owner, TTL: h.ttl}})
				}
			}
		}()
	}
	detached := context.WithoutCancel(ctx)
	if broken("release uses the caller's context") {
		detached = ctx
	}
	found, err := call(detached, c, c.requestTimeout(h.ttl), func(ctx context.Context) (bool, error) {
		return c.d.Release(ctx, h.owner)
	}, nil)
	if broken("release reports every outcome as nil") {
		found, err = true, nil
	}`},

	{scheduleFile,
		`			if it.until.Load() <= now {
				b.after.add(`,
		`			if broken("loss waits for the answer to an extension") {
				c.addExtension(&b, it, now)
			} else if it.until.Load() <= now && broken("loss is seen by Done only") {
				c.unschedule(it)
				time.AfterFunc(300*time.Millisecond, func() { c.expire(it) })
			} else if it.until.Load() <= now {
				b.after.add(`},
	{scheduleFile,
		`		c.mu.Lock()
		if !h.ended && (!h.noRenew || h.claim > 0) {
			h.renewAt = min(`,
		`		c.mu.Lock()
		if broken("one extension that fails is a loss") ||
			broken("loss waits for the answer to an extension") && c.clock.Now() > h.until.Load() {
			after := c.end(h, ErrLost)
			c.mu.Unlock()
			after.run()
			continue
		}
		if broken("an extension that fails is not repeated") {
			h.renewAt = never
			c.mu.Unlock()
			continue
		}
		if !h.ended && (!h.noRenew || h.claim > 0) {
			h.renewAt = min(`},
	{scheduleFile,
		`	case driver.EventRecheck:
		c.mu.Lock()`,
		`	case driver.EventRecheck:
		if broken("a recheck is ignored") {
			return
		}
		c.mu.Lock()`},
	{scheduleFile,
		`	var slack time.Duration
	for _, h := range b.holds {`,
		`	if broken("polls go one by one") && len(b.waiters) > 0 || broken("extensions go one by one") && len(b.holds) > 0 {
		return b
	}
	var slack time.Duration
	for _, h := range b.holds {`},

	{"locker.go",
		`		if !returned {`,
		`		if !returned && !broken("Do releases not on a panic") {`},
	{"locker.go",
		`	if lost := lease.Err(); errors.Is(lost, ErrLost) {
		err = errors.Join(err, lost)
	}
	return errors.Join(err, lease.Release(ctx))`,
		`	if lost := lease.Err(); errors.Is(lost, ErrLost) {
		err = errors.Join(err, lost)
		if broken("Do hides a loss") {
			return nil
		}
	}
	if broken("Do hides what fn returned") {
		err = nil
	}
	return errors.Join(err, lease.Release(ctx))`},
	{"lockall.go",
		`	names = slices.Compact(slices.Sorted(slices.Values(names)))`,
		`	if !broken("LockAll takes names in the order given") {
		names = slices.Compact(slices.Sorted(slices.Values(names)))
	}`},
	{"lockall.go",
		`			return nil, errors.Join(err, s.giveBack(ctx))`,
		`			if broken("LockAll keeps what it has when it fails") {
				return nil, err
			}
			return nil, errors.Join(err, s.giveBack(ctx))`},
	{"lockall.go",
		`			l.onEnd(func() { lost(l.Err()) })`,
		`			if !broken("LockAll does not see a loss while it waits") {
				l.onEnd(func() { lost(l.Err()) })
			}`},

	{clientFile,
		`func margin(ttl time.Duration) time.Duration { return`,
		`func margin(ttl time.Duration) time.Duration {
	if broken("V has no margin") {
		return 0
	}
	return`},
	{clientFile,
		`	e := c.opError(op, n, err)
	switch sure := errors.Is(err, ErrUnavailable); {`,
		`	e := c.opError(op, n, err)
	if broken("a timeout is called unavailable") && ctx.Err() == nil {
		e.Err, e.Cause = ErrUnavailable, err
		return e
	}
	if broken("a refusal is called uncertain") && ctx.Err() == nil {
		e.Err, e.Cause, e.Until = ErrUncertain, err, until
		return e
	}
	switch sure := errors.Is(err, ErrUnavailable); {`},
	{clientFile,
		`			c.clean(it.owner, never)
			after.add(`,
		`			c.clean(it.owner, never)
			if broken("close leaves leases believed") {
				c.unschedule(it)
				continue
			}
			after.add(`},
	{"cleanup.go",
		`		if err != nil && now < j.retry && c.ctx.Err() == nil {`,
		`		if err != nil && now < j.retry && c.ctx.Err() == nil && !broken("what cannot be undone is not tried again") {`},
}
