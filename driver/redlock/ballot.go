package redlock

import (
	"strconv"

	"github.com/fencelock/fencelock/driver"
)

// said is what a node said to a proposal. The first ones are numbers of prelude.lua.
type said uint8

const (
	mine      said = iota + 1 // the owner has the slot on this node, with the token
	other                     // somebody else has the slot
	low                       // the token is not above what the node has stored
	far                       // a first proposal is too far ahead of the node's clock
	uncounted                 // mine, but the node may have forgotten what it promised to others
	failed                    // nothing, and surely nothing happened
	unknown                   // nothing, and it may have happened or may happen yet
)

// vote is a node's answer to a proposal.
type vote struct {
	said  said
	token driver.Token      // with mine that of the owner, else what the node has stored, or its clock
	slot  string            // with mine
	busy  map[string]string // slots that others have, and who they are
}

// verdict is what the votes so far mean.
type verdict uint8

const (
	open  verdict = iota // more votes are needed
	won                  // a majority has given the owner one slot with one token
	held                 // no majority is to be had, because of others
	again                // another proposal may win, and what this one has got may be kept meanwhile
	yield                // as again, but what this one has got is in the way of others
	short                // too few nodes take part, and surely no majority has accepted
	vague                // a node that did not answer may make a majority
)

// ballot decides about one proposal from what the nodes say to it. It counts votes and does nothing else.
type ballot struct {
	id       string // of the owner
	quorum   int
	limit    int          // slots
	floor    driver.Token // which the next proposal must exceed
	proposal driver.Token
	slot     string
	votes    []vote // by node, said is 0 of those that have not answered
	distrust bool   // the client's clock is too far ahead

	// The result, when won.
	token driver.Token
	place string
}

func newBallot(id string, nodes, limit int, floor driver.Token) *ballot {
	return &ballot{id: id, quorum: nodes/2 + 1, limit: limit, floor: floor, votes: make([]vote, nodes)}
}

// propose begins anew: earlier votes were for another proposal.
func (b *ballot) propose(t driver.Token, slot string) {
	b.proposal, b.slot = t, slot
	clear(b.votes)
}

// verdict says what the votes mean. It stays open while a vote that is yet to come can matter.
func (b *ballot) verdict() verdict {
	pending, unknowns, others, able := 0, 0, 0, 0
	best := 0 // votes for one token
	for i, v := range b.votes {
		switch v.said {
		case 0:
			pending++
		case unknown:
			unknowns++
		case other:
			others++
			able++
		case low, far:
			able++
		case mine:
			able++
			n := 0
			for _, w := range b.votes {
				if w.said == mine && w.token == v.token && w.slot == v.slot {
					n++
				}
			}
			if n > best {
				best = n
				b.token, b.place = b.votes[i].token, b.votes[i].slot
			}
		}
	}
	switch {
	case best >= b.quorum:
		switch {
		case !b.crowded():
			return won
		case b.full():
			return held
		}
		return yield
	case best+pending >= b.quorum:
		return open
	case best+pending+unknowns >= b.quorum:
		// A token can still get a majority, by a request that is on its way, and who asks again would find it.
		if pending > 0 {
			return open
		}
		return vague
	}
	// This proposal cannot win any more.
	_, free := b.free(0)
	leader, votes := b.leader(b.slot)
	switch {
	case able-others >= b.quorum:
		return again
	case b.full(), b.limit == 1 && votes >= b.quorum:
		return held
	case pending > 0 && able+pending >= b.quorum:
		return open
	case able >= b.quorum && (leader == shortID(b.id) || free):
		return again
	case able >= b.quorum && b.limit == 1:
		return held
	case able >= b.quorum:
		return yield
	case pending > 0:
		return open // what is left on those nodes?
	case unknowns > 0:
		return vague
	}
	return short
}

// shortID is enough of an id to tell those apart who want one name at the same time.
func shortID(id string) string { return id[:min(len(id), 8)] }

// leader answers who has a slot on the most nodes. When several want it at once and nobody gets a majority, all see the
// same leader: the others give way to it, and it asks again.
func (b *ballot) leader(slot string) (id string, votes int) {
	count := make(map[string]int)
	for _, v := range b.votes {
		who := v.busy[slot]
		if v.said == mine && v.slot == slot {
			who = shortID(b.id)
		}
		if who == "" {
			continue
		}
		count[who]++
		if n := count[who]; n > votes || n == votes && who < id {
			id, votes = who, n
		}
	}
	return id, votes
}

// full says that others have as many slots as the limit allows, each on a majority.
func (b *ballot) full() bool {
	count := make(map[string]int)
	slots := 0
	for _, v := range b.votes {
		for slot, who := range v.busy {
			key := slot + ":" + who
			if count[key]++; count[key] == b.quorum {
				slots++
			}
		}
	}
	return slots >= b.limit
}

// crowded says of a permit that, counting it, more than its own limit may be held. Whoever has a slot on a majority is
// seen by one of the nodes that have given this one; of two that are taken at once, one sees the other.
func (b *ballot) crowded() bool {
	taken := map[string]bool{b.place: true}
	for _, v := range b.votes {
		if v.said == mine && v.token == b.token && v.slot == b.place {
			for s := range v.busy {
				taken[s] = true
			}
		}
	}
	return len(taken) > b.limit
}

// free answers a slot that nobody was seen to have, the first one from number start on.
func (b *ballot) free(start int) (string, bool) {
	taken := make(map[string]bool)
	for _, v := range b.votes {
		for s := range v.busy {
			taken[s] = true
		}
	}
	for i := range min(b.limit, len(taken)+1) {
		if s := strconv.Itoa((start + i) % b.limit); !taken[s] {
			return s, true
		}
	}
	return "", false
}

// next is the token to propose now: above what the nodes have told of and the floor, and not below the clock, unless a
// node has found that too far ahead of its own.
func (b *ballot) next(clock driver.Token) driver.Token {
	for _, v := range b.votes {
		b.distrust = b.distrust || v.said == far
	}
	t := max(b.seen(), b.floor) + 1
	if b.distrust {
		return t
	}
	return max(t, clock)
}

// mode tells the nodes how to take the proposal of a trip. The first one leaves an owner the token that it has; each but
// one that rests only on what nodes have said is compared with their clocks.
func (b *ballot) mode(trip int) string {
	switch {
	case trip == 1:
		return "first"
	case b.distrust:
		return "later"
	}
	return "again"
}

// seen is the greatest token that the nodes have told of.
func (b *ballot) seen() (t driver.Token) {
	for _, v := range b.votes {
		t = max(t, v.token)
	}
	return t
}
