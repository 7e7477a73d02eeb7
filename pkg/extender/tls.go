package extender

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// tlsFilesAge is how long the files' content is used before the files are read again.
const tlsFilesAge = time.Second

// ServerTLS returns a configuration that serves the certificate of certFile and keyFile. If clientCAFile is not empty,
// clients must have a certificate that is signed by its CA. All files are read again when they change, and new connections
// use the new content. Clients below TLS 1.3 are rejected. expires is called with the certificate's expiry.
func ServerTLS(certFile, keyFile, clientCAFile string, expires func(time.Time)) (*tls.Config, error) {
	files := &tlsFiles{cert: certFile, key: keyFile, clientCA: clientCAFile, expires: expires}
	if _, err := files.config(nil); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: files.config}, nil
}

// tlsFiles builds the TLS configuration from the files, and rebuilds it when one of them changes. If files can't be read or
// used (they may be half written), the previous configuration stays in use.
type tlsFiles struct {
	cert, key string
	// clientCA is empty if clients need no certificate.
	clientCA string
	expires  func(time.Time)

	mu      sync.Mutex
	current *tls.Config
	// content is what current was built from. Modification times are not enough: two changes can have the same.
	content tlsContent
	readAt  time.Time
	// problem is the last logged error about files that can't be used, so that the same error is logged once.
	problem string
}

type tlsContent struct{ cert, key, clientCA string }

// config implements GetConfigForClient of tls.Config. It returns the same configuration as long as nothing changes, which
// lets clients resume sessions. A session that was admitted by an earlier CA is not resumed.
func (f *tlsFiles) config(*tls.ClientHelloInfo) (*tls.Config, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.current != nil && time.Since(f.readAt) < tlsFilesAge {
		return f.current, nil
	}
	f.readAt = time.Now()
	err := f.update()
	switch {
	case err == nil:
		f.problem = ""
	case f.current == nil:
		return nil, err
	case err.Error() != f.problem:
		f.problem = err.Error()
		klog.Background().Error(err, "The changed TLS files can't be used, the previous ones stay in use")
	}
	return f.current, nil
}

// update reads the files, and builds a new configuration if their content has changed.
func (f *tlsFiles) update() error {
	content, err := f.read()
	if err != nil || f.current != nil && content == f.content {
		return err
	}
	pair, err := tls.X509KeyPair([]byte(content.cert), []byte(content.key))
	if err != nil {
		return fmt.Errorf("--tls-cert-file, --tls-key-file: %w", err)
	}
	// kube-scheduler would use HTTP/2. It closes a connection over HTTP/1.1 when a request times out, but one over HTTP/2 to a
	// leader that has vanished only after 45 s (k8s.io/apimachinery pkg/util/net/http.go, configureHTTP2Transport).
	config := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"}}
	if f.clientCA != "" {
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM([]byte(content.clientCA)) {
			return fmt.Errorf("--client-ca-file: no certificate in %s", f.clientCA)
		}
	}
	chain := parseChain(pair.Certificate)
	f.expires(expiry(chain))
	if now := time.Now(); now.After(expiry(chain)) || now.Before(chain[0].NotBefore) {
		klog.Background().Error(nil, "The extender's certificate is not valid now, so kube-scheduler rejects it", "file", f.cert,
			"notBefore", chain[0].NotBefore, "notAfter", expiry(chain))
	}
	f.current, f.content = config, content
	return nil
}

// parseChain returns the certificates of a chain that can be parsed, always with the first: tls.X509KeyPair has parsed it.
func parseChain(raw [][]byte) []*x509.Certificate {
	var chain []*x509.Certificate
	for _, der := range raw {
		if cert, err := x509.ParseCertificate(der); err == nil {
			chain = append(chain, cert)
		}
	}
	return chain
}

// expiry returns the earliest expiry time of the certificates. chain must not be empty.
func expiry(chain []*x509.Certificate) time.Time {
	at := chain[0].NotAfter
	for _, cert := range chain[1:] {
		if cert.NotAfter.Before(at) {
			at = cert.NotAfter
		}
	}
	return at
}

func (f *tlsFiles) read() (content tlsContent, err error) {
	read := func(flags, path string) string {
		if path == "" || err != nil {
			return ""
		}
		text, failure := os.ReadFile(path)
		if failure != nil {
			err = fmt.Errorf("%s: %w", flags, failure)
		}
		return string(text)
	}
	const pair = "--tls-cert-file, --tls-key-file"
	content = tlsContent{cert: read(pair, f.cert), key: read(pair, f.key), clientCA: read("--client-ca-file", f.clientCA)}
	return content, err
}
