package main

import (
	"context"
	"flag"
	"fmt"
	"net/url"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/fencelock/fencelock/driver"
)

var versionCommand = &command{
	name:    "version",
	summary: "print the version, the URL schemes it knows and the URL in effect",
	about: `Examples:

  fencelock version
`,
	setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) error {
		backend := urlFlag(fs)
		return func(_ context.Context, c *cli, args []string) error {
			if len(args) > 0 {
				return usageError("version takes no arguments")
			}
			return c.print(fmt.Sprintf("fencelock %s %s %s/%s\nschemes: %s\nurl: %s\n", version(),
				runtime.Version(), runtime.GOOS, runtime.GOARCH,
				strings.Join(driver.Schemes(), ", "), c.redactedURL(*backend)))
		}
	},
}

// version is what the Go toolchain has recorded.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}

// redactedURL shows which backend is used, without whatever may be a secret: all of a URL that does not parse,
// user and password, and the values of parameters.
func (c *cli) redactedURL(flagged string) string {
	backend, err := c.backendURL(flagged)
	if err != nil {
		return "none"
	}
	u, err := url.Parse(backend)
	if err != nil {
		return "(does not parse)"
	}
	if u.User != nil {
		u.User = url.User("xxxxx")
	}
	if u.RawQuery != "" {
		u.RawQuery = "xxxxx"
	}
	if u.Opaque != "" {
		u.Opaque = "xxxxx"
	}
	u.Fragment = ""
	return u.String()
}
