package lab

import (
	"fmt"
	"html"
	"io"
	"strings"
	"time"

	"github.com/fencelock/fencelock/conformance/history"
)

const (
	pictureWidth = 860
	nameWidth    = 76
	rowHeight    = 58
	topMargin    = 30
)

// style is that of all pictures, in light and dark.
const style = `.bg{fill:#fff}.ink{fill:#1c2330}.dim{fill:#5b6472}.line{stroke:#8a93a3;fill:none}.holder{fill:#2f6fde}.rival{fill:#1f9d63}` +
	`.fault{fill:#f3c969;opacity:.35}.stop{fill:#8a93a3;opacity:.45}.on{fill:#fff}.bad{fill:#c8372d}.refused{stroke:#c8372d;stroke-width:2;fill:none}.ok{fill:#5b6472}` +
	`@media(prefers-color-scheme:dark){.bg{fill:#0f141c}.ink{fill:#e8ecf3}.dim{fill:#9aa4b5}.line{stroke:#6b7687}.holder{fill:#6a9bf4}.rival{fill:#4cc38a}` +
	`.fault{fill:#b98a1f}.stop{fill:#6b7687}.on{fill:#0f141c}.bad{fill:#f0716a}.refused{stroke:#f0716a}.ok{fill:#9aa4b5}}`

// WriteTimeline writes a picture of a lane, in SVG: what holder and rival believed with which token, when the fault was
// on, and what became of the writes. Tokens are shown by their last six digits.
func (l *Lane) WriteTimeline(w io.Writer, title string) error {
	p := &picture{title: title}
	p.draw(l.History)
	_, err := io.WriteString(w, p.String())
	return err
}

type picture struct {
	strings.Builder
	title    string
	from, to int64
	over     int64 // the end of the fault
}

func (p *picture) x(t int64) float64 {
	t = min(max(t, p.from), p.to)
	return nameWidth + float64(t-p.from)/float64(max(p.to-p.from, 1))*(pictureWidth-nameWidth-16)
}

func (p *picture) put(format string, args ...any) { p.WriteString(fmt.Sprintf(format+"\n", args...)) }

func (p *picture) bar(class string, from, to int64, y, height int, title string) {
	x := p.x(from)
	p.put(`<rect class="%s" x="%.1f" y="%d" width="%.1f" height="%d" rx="2"><title>%s</title></rect>`, class, x, y,
		max(p.x(to)-x, 1), height, html.EscapeString(title))
}

func (p *picture) draw(h history.History) {
	if len(h) == 0 {
		h = history.History{{}}
	}
	p.from, p.to = h[0].T, h[len(h)-1].T
	for _, e := range h { // the closing of the processes shows nothing
		if e.Type == history.Started {
			p.from = e.T
			break
		}
	}
	rows := []string{"holder", "rival"}
	for _, e := range h {
		if e.Type == history.FaultEnd {
			p.over = e.T
		}
	}
	row := func(process string) int {
		if strings.HasSuffix(process, rows[1]) {
			return topMargin + rowHeight
		}
		return topMargin
	}
	height := topMargin + len(rows)*rowHeight + 34
	p.put(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" font-family="system-ui,sans-serif" font-size="12">`, pictureWidth, height)
	p.put(`<title>%s</title><style>%s</style><rect class="bg" width="%d" height="%d" rx="6"/>`, html.EscapeString(p.title), style, pictureWidth, height)
	p.put(`<text class="ink" x="12" y="18">%s</text>`, html.EscapeString(p.title))
	p.faults(h, height)
	for i, name := range rows {
		y := topMargin + i*rowHeight
		p.put(`<text class="ink" x="12" y="%d">%s</text>`, y+22, name)
		for line, what := range []string{"guard", "none"} {
			p.put(`<text class="dim" x="44" y="%d" font-size="9">%s</text><path class="line" d="M%d %d H%d"/>`,
				y+lineAt(line)+3, what, nameWidth, y+lineAt(line), pictureWidth-16)
		}
	}
	for _, b := range history.Beliefs(h) {
		y := row(b.Process)
		class := "holder"
		if y != topMargin {
			class = "rival"
		}
		p.bar(class, b.From, b.To, y+8, 20, fmt.Sprintf("token %d, %v", b.Token, time.Duration(b.To-b.From).Round(time.Millisecond)))
		if p.x(b.To)-p.x(b.From) > 60 {
			p.put(`<text class="on" x="%.1f" y="%d">%06d</text>`, p.x(b.From)+6, y+22, b.Token%1000000)
		}
		if b.Told > 0 {
			p.put(`<path class="refused" d="M%.1f %d v28"><title>told lost</title></path>`, p.x(b.To), y+4)
		}
	}
	p.stops(h, row)
	p.writes(h, row)
	p.axis(height)
	p.put(`</svg>`)
}

// faults draws when something was wrong.
func (p *picture) faults(h history.History, height int) {
	began := int64(0)
	for _, e := range h {
		switch e.Type {
		case history.FaultBegin:
			began = e.T
		case history.FaultEnd:
			p.bar("fault", began, e.T, topMargin, height-topMargin-24, "fault: "+e.Fault)
		}
	}
}

// stops draws when a process was stopped.
func (p *picture) stops(h history.History, row func(string) int) {
	since := map[string]int64{}
	for _, e := range h {
		switch e.Type {
		case history.ProcessStopped:
			since[e.Process] = e.T
		case history.ProcessContinued:
			p.bar("stop", since[e.Process], e.T, row(e.Process)+4, 28, "process stopped")
		case history.ProcessEnded:
			if e.T > p.over { // all end then
				continue
			}
			p.put(`<text class="bad" x="%.1f" y="%d">&#x2715;<title>process killed or ended</title></text>`, p.x(e.T)-4, row(e.Process)+4)
		}
	}
}

// writes draws a dot for each write that was let through, red if it was stale, and a cross for what a guard refused.
func (p *picture) writes(h history.History, row func(string) int) {
	y := func(e history.Event) int {
		line := 1
		if strings.Contains(e.Resource, fencedPath) {
			line = 0
		}
		return row(e.Process) + lineAt(line)
	}
	for _, e := range h {
		switch e.Type {
		case history.WriteAdmitted:
			p.put(`<circle class="ok" cx="%.1f" cy="%d" r="1.5"/>`, p.x(e.T), y(e))
		case history.WriteRefused:
			p.put(`<path class="refused" d="M%.1f %d l8 8 m0 -8 l-8 8"><title>refused: %d is stale</title></path>`, p.x(e.T)-4, y(e)-4, e.Token)
		}
	}
	for _, e := range history.StaleWrites(h) {
		p.put(`<circle class="bad" cx="%.1f" cy="%d" r="5"><title>stale write let through: %d</title></circle>`, p.x(e.T), y(e), e.Token)
	}
}

// lineAt is how far below the top of a row the writes to the guarded resource are drawn, and those to the others.
func lineAt(line int) int { return 36 + 10*line }

// axis draws the time.
func (p *picture) axis(height int) {
	span := time.Duration(p.to - p.from)
	step := time.Second
	for span/step > 10 {
		step *= 2
	}
	for t := time.Duration(0); t <= span; t += step {
		p.put(`<text class="dim" x="%.1f" y="%d">%v</text>`, p.x(p.from+int64(t)), height-10, t)
	}
}
