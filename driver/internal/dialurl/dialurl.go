// Package dialurl reads what the URLs of several drivers have in common: lists of hosts, and the files of TLS.
package dialurl

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/url"
	"os"
	"strings"

	"github.com/fencelock/fencelock/driver"
)

// Hosts answers the addresses in a list such as h1,h2:7000, each with a port. In a list only names and IPv4
// addresses can stand, since a URL with more than one in brackets does not parse.
func Hosts(u *url.URL, defaultPort string) (addrs []string, err error) {
	for host := range strings.SplitSeq(u.Host, ",") {
		name, port, err := net.SplitHostPort(host)
		if err != nil {
			name, port = strings.Trim(host, "[]"), defaultPort
		}
		if name == "" || port == "" || strings.Contains(name, ":") && !strings.HasPrefix(host, "[") {
			return nil, driver.Invalid("url host", host, "must be a host or host:port")
		}
		addrs = append(addrs, net.JoinHostPort(name, port))
	}
	return addrs, nil
}

// TLS are the parameters of a URL that concern TLS.
type TLS struct {
	CA         string // file of the authorities to trust, default those of the system
	Cert, Key  string // files of the client's own certificate
	ServerName string // expected in the server's certificate, default the host that is dialled
}

// ReadTLS reads the parameters ca, cert, key and server-name.
func ReadTLS(p *driver.Params) TLS {
	return TLS{p.String("ca", ""), p.String("cert", ""), p.String("key", ""), p.String("server-name", "")}
}

// Config reads the files.
func (t TLS) Config() (*tls.Config, error) {
	cfg := &tls.Config{ServerName: t.ServerName, MinVersion: tls.VersionTLS12}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, driver.Invalid("url parameter ca", t.CA, err.Error())
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, driver.Invalid("url parameter ca", t.CA, "must be a file of PEM certificates")
		}
	}
	if (t.Cert == "") != (t.Key == "") {
		return nil, driver.Invalid("url parameters cert and key", t.Cert+" "+t.Key, "must be given together")
	}
	if t.Cert != "" {
		pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, driver.Invalid("url parameters cert and key", t.Cert+" "+t.Key, err.Error())
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}
