package redislua

import (
	"slices"
	"strconv"
	"time"
)

// Words are the keys or the arguments of a call. They are pieces of one buffer, which spares an
// allocation for each.
type Words struct {
	text []byte
	ends []int
}

// Len answers how many words there are.
func (w *Words) Len() int { return len(w.ends) }

// At answers the word at index i. It must not be changed.
func (w *Words) At(i int) []byte {
	from := 0
	if i > 0 {
		from = w.ends[i-1]
	}
	return w.text[from:w.ends[i]:w.ends[i]]
}

// All yields the words, for a client library that wants strings. They are pieces of one string.
func (w *Words) All(yield func(string) bool) {
	text, from := string(w.text), 0
	for _, to := range w.ends {
		if !yield(text[from:to]) {
			return
		}
		from = to
	}
}

// Strings answers the words as strings.
func (w *Words) Strings() []string { return slices.Collect(w.All) }

// end makes a word of what was added to the text since the last one.
func (w *Words) end() { w.ends = append(w.ends, len(w.text)) }

// add adds one word that consists of the pieces.
func (w *Words) add(pieces ...string) {
	for _, p := range pieces {
		w.text = append(w.text, p...)
	}
	w.end()
}

func (w *Words) number(n uint64) {
	w.text = strconv.AppendUint(w.text, n, 10)
	w.end()
}

// duration adds d in milliseconds, rounded up.
func (w *Words) duration(d time.Duration) {
	w.number(milliseconds(d))
}

func milliseconds(d time.Duration) uint64 {
	return uint64((d + time.Millisecond - 1) / time.Millisecond)
}

// part adds the words of the i-th of n items, all of which have as many.
func (w *Words) part(to *Words, i, n int) {
	each := w.Len() / n
	for k := i * each; k < (i+1)*each; k++ {
		to.text = append(to.text, w.At(k)...)
		to.end()
	}
}
