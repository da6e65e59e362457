package containers

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
)

// EtcdOptions says what to run. The zero value of each field is its default.
type EtcdOptions struct {
	// Image is the image to run. It holds the program etcd, 3.5 or later; its entrypoint is none. Default
	// quay.io/coreos/etcd:v3.5.21.
	Image string

	// Args are further arguments in the form of the command line, such as "--quota-backend-bytes", "1048576". They
	// overrule the defaults of the server; names, directories and addresses they must not.
	Args []string
}

// StartEtcd runs a new etcd cluster of one member and returns when it serves, otherwise like StartRedis. Every new
// container, so also StartEmpty, makes another cluster, with an id of its own.
func StartEtcd(ctx context.Context, opts *EtcdOptions) (*Container, error) {
	var o EtcdOptions
	if opts != nil {
		o = *opts
	}
	if o.Image == "" {
		o.Image = "quay.io/coreos/etcd:v3.5.21"
	}
	const name, peer, client = "etcd", "http://127.0.0.1:2380", "http://0.0.0.0:2379"
	return start(ctx, spec{
		name:  "etcd",
		image: o.Image,
		command: func() []string {
			return append([]string{
				"etcd", "--name", name, "--data-dir", dataDir + "/etcd",
				"--listen-client-urls", client, "--advertise-client-urls", client,
				"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
				"--initial-cluster", name + "=" + peer, "--initial-cluster-token", rand.Text(),
				"--log-level", "warn",
			}, o.Args...)
		},
		port:  "2379/tcp",
		ready: healthy,
	})
}

// healthy returns nil if the etcd at addr takes part in a cluster that has a leader.
func healthy(ctx context.Context, addr string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/health?exclude=NOSPACE", nil)
	if err != nil {
		return err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return fmt.Errorf("%s: %s", resp.Status, text)
	}
	return nil
}
