package lab

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/history"
)

// sampleReport is of one lane in which everything is to be seen.
func sampleReport() *Report {
	second := int64(time.Second)
	holder, rival := "lane-1 holder", "lane-1 rival"
	h := history.History{
		{T: 1, Type: history.Started, Kind: history.Lock, Process: holder, Attempt: 1, TTL: time.Second},
		{T: 2, Type: history.Acquired, Process: holder, Attempt: 1, Token: 1000041, V: second * 99 / 100},
		{T: second / 10, Type: history.WriteAdmitted, Process: holder, Token: 1000041, Resource: "http://x/fenced/lane-1", Called: second/10 - 1},
		{T: second / 5, Type: history.FaultBegin, Fault: HolderPaused.Name},
		{T: second / 5, Type: history.ProcessStopped, Process: holder},
		{T: second / 5, Type: history.FaultHit, Fault: "lane-1"},
		{T: second * 11 / 10, Type: history.Started, Kind: history.Lock, Process: rival, Attempt: 1, TTL: time.Second},
		{T: second * 12 / 10, Type: history.Acquired, Process: rival, Attempt: 1, Token: 1000042, V: second * 22 / 10},
		{T: second * 13 / 10, Type: history.WriteAdmitted, Process: rival, Token: 1000042, Resource: "http://x/open/lane-1", Called: second*13/10 - 1},
		{T: second * 14 / 10, Type: history.ProcessContinued, Process: holder},
		{T: second * 15 / 10, Type: history.WriteRefused, Process: holder, Token: 1000041, Resource: "http://x/fenced/lane-1", Called: second*15/10 - 1},
		{T: second * 16 / 10, Type: history.WriteAdmitted, Process: holder, Token: 1000041, Resource: "http://x/open/lane-1", Called: second*16/10 - 1},
		{T: second * 17 / 10, Type: history.FaultEnd, Fault: HolderPaused.Name},
		{T: second * 2, Type: history.ReleaseCalled, Process: rival, Attempt: 1},
	}
	lane := &Lane{Name: "lane-1", Findings: map[Finding]int{StaleUnfenced: 1}, Next: time.Second, History: h}
	return &Report{Began: time.Unix(1e9, 0).UTC(), Machine: "a machine", Results: []*Result{
		{Backend: Redis.Name, Scenario: HolderPaused.Name, Lanes: []*Lane{lane}},
		{Backend: Etcd.Name, Scenario: HolderPaused.Name, Lanes: []*Lane{lane}, Unexpected: []string{`<script>document.title = "escaped"</script>`}},
	}}
}

// TestPage looks at the page in a real browser, in light and dark.
func TestPage(t *testing.T) {
	var page bytes.Buffer
	if err := sampleReport().WriteHTML(&page); err != nil {
		t.Fatal(err)
	}
	if m := regexp.MustCompile(`(?i)(src|href)="?(https?:)?//|@import|url\(`).Find(page.Bytes()); m != nil {
		t.Errorf("the page asks the network for something: %q", m)
	}
	// The pictures are behind a click.
	file := filepath.Join(t.TempDir(), "page.html")
	if err := os.WriteFile(file, bytes.ReplaceAll(page.Bytes(), []byte("<details>"), []byte("<details open>")), 0o600); err != nil {
		t.Fatal(err)
	}
	dom := string(browse(t, "--dump-dom", "file://"+file))
	for what, n := range map[string]int{`<svg `: 2, `id="overview"`: 1, `stale write let through: 1000041`: 2, `refused: 1000041 is stale`: 2, `class="UNEXPECTED"`: 2} {
		if got := strings.Count(dom, what); got != n {
			t.Errorf("%s in the page as the browser has it: got %d, want %d", what, got, n)
		}
	}
	if strings.Contains(dom, "<title>escaped") {
		t.Error("a text of the report was run as a script")
	}
	for name, look := range map[string]struct {
		flag       string
		background color.RGBA
		seen       []color.RGBA // ink, the holder's bar, the rival's, a stale write
	}{
		"light": {"--blink-settings=preferredColorScheme=1", rgb(0xffffff), []color.RGBA{rgb(0x1c2330), rgb(0x2f6fde), rgb(0x1f9d63), rgb(0xc8372d)}},
		"dark":  {"--blink-settings=preferredColorScheme=0", rgb(0x0f141c), []color.RGBA{rgb(0xe8ecf3), rgb(0x6a9bf4), rgb(0x4cc38a), rgb(0xf0716a)}},
	} {
		picture := filepath.Join(t.TempDir(), name+".png")
		browse(t, look.flag, "--window-size=1100,1400", "--screenshot="+picture, "file://"+file)
		data, err := os.ReadFile(picture)
		if err != nil {
			t.Fatal(err)
		}
		img, err := png.Decode(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		if got := color.RGBAModel.Convert(img.At(3, 3)); got != look.background {
			t.Errorf("%s: background: got %v, want %v", name, got, look.background)
		}
		counts := pixels(img)
		for _, c := range look.seen {
			if counts[c] < 20 {
				t.Errorf("%s: pixels of colour %v: got %d, want some", name, c, counts[c])
			}
		}
	}
}

func rgb(v uint32) color.RGBA { return color.RGBA{uint8(v >> 16), uint8(v >> 8), uint8(v), 0xff} }

func pixels(img image.Image) map[color.RGBA]int {
	counts := map[color.RGBA]int{}
	for y := img.Bounds().Min.Y; y < img.Bounds().Max.Y; y++ {
		for x := img.Bounds().Min.X; x < img.Bounds().Max.X; x++ {
			counts[color.RGBAModel.Convert(img.At(x, y)).(color.RGBA)]++
		}
	}
	return counts
}

// browse runs a browser without a window, and answers what it prints.
func browse(t *testing.T, args ...string) []byte {
	t.Helper()
	args = append([]string{"--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
		"--disable-background-networking", "--user-data-dir=" + t.TempDir()}, args...)
	cmd := exec.CommandContext(t.Context(), "chromium", args...)
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(fmt.Errorf("%v: %w\n%s", args, err, log.Bytes()))
	}
	return out
}
