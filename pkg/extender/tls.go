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

// tlsFilesAge is how long the files' content is used before their times are looked at again.
const tlsFilesAge = time.Second

// ServerTLS returns a configuration that serves the certificate of the two files, and asks clients for a certificate
// signed by the CA of clientCAFile where one is named. All of them are read again once they change: new connections meet
// the new ones. Clients below TLS 1.3 are refused.
func ServerTLS(certFile, keyFile, clientCAFile string) (*tls.Config, error) {
	files := &tlsFiles{cert: certFile, key: keyFile, clientCA: clientCAFile}
	if _, err := files.config(nil); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: files.config}, nil
}

// tlsFiles makes the configuration of the files, anew once one of them changes. Files that can't be read (they may be half
// written) leave the configuration before in place.
type tlsFiles struct {
	cert, key string
	// clientCA is empty where clients need no certificate.
	clientCA string

	mu      sync.Mutex
	current *tls.Config
	changed [3]time.Time
	looked  time.Time
}

// config implements tls.Config's GetConfigForClient. It returns one and the same configuration while nothing changes,
// and with it lets clients resume sessions; none is resumed that an earlier CA admitted.
func (f *tlsFiles) config(*tls.ClientHelloInfo) (*tls.Config, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.current != nil && time.Since(f.looked) < tlsFilesAge {
		return f.current, nil
	}
	f.looked = time.Now()
	changed := [3]time.Time{modified(f.cert), modified(f.key), modified(f.clientCA)}
	if f.current != nil && changed == f.changed {
		return f.current, nil
	}
	config, err := f.read()
	switch {
	case err == nil:
		f.current, f.changed = config, changed
	case f.current == nil:
		return nil, err
	default:
		klog.Background().Error(err, "The changed TLS files can't be used: the ones before still are")
	}
	return f.current, nil
}

func (f *tlsFiles) read() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert-file, --tls-key-file: %w", err)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"}}
	if f.clientCA == "" {
		return config, nil
	}
	pem, err := os.ReadFile(f.clientCA)
	if err != nil {
		return nil, fmt.Errorf("--client-ca-file: %w", err)
	}
	config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
	if !config.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--client-ca-file: no certificate in %s", f.clientCA)
	}
	return config, nil
}

func modified(path string) time.Time {
	info, err := os.Stat(path)
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}
