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

// certificateAge is how long a certificate is served before its files are looked at again.
const certificateAge = time.Second

// ServerTLS returns a configuration that serves the certificate of the two files, also after they changed, and asks
// clients for a certificate signed by the CA of clientCAFile where one is named. Clients below TLS 1.3 are refused.
func ServerTLS(certFile, keyFile, clientCAFile string) (*tls.Config, error) {
	files := &certificateFiles{cert: certFile, key: keyFile}
	if _, err := files.get(nil); err != nil {
		return nil, err
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: files.get, NextProtos: []string{"http/1.1"}}
	if clientCAFile != "" {
		pem, err := os.ReadFile(clientCAFile)
		if err != nil {
			return nil, fmt.Errorf("--client-ca-file: %w", err)
		}
		config.ClientCAs = x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--client-ca-file: no certificate in %s", clientCAFile)
		}
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return config, nil
}

// certificateFiles reads a certificate and its key again once they change. A pair that can't be read (it may be half
// written) leaves the one before in place.
type certificateFiles struct {
	cert, key string

	mu      sync.Mutex
	current *tls.Certificate
	changed [2]time.Time
	looked  time.Time
}

func (f *certificateFiles) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.current != nil && time.Since(f.looked) < certificateAge {
		return f.current, nil
	}
	f.looked = time.Now()
	changed := [2]time.Time{modified(f.cert), modified(f.key)}
	if f.current != nil && changed == f.changed {
		return f.current, nil
	}
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	switch {
	case err == nil:
		f.current, f.changed = &pair, changed
	case f.current == nil:
		return nil, fmt.Errorf("--tls-cert-file, --tls-key-file: %w", err)
	default:
		klog.Background().Error(err, "The changed certificate can't be read: the one before is still served")
	}
	return f.current, nil
}

func modified(path string) time.Time {
	info, err := os.Stat(path)
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}
