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

// tlsFilesAge is how long the files' content is used before they are looked at again.
const tlsFilesAge = time.Second

// ServerTLS returns a configuration that serves the certificate of the two files, and asks clients for a certificate
// signed by the CA of clientCAFile where one is named. All of them are read again once they change: new connections meet
// the new ones. Clients below TLS 1.3 are refused. expires is called with the time at which the served certificate expires.
func ServerTLS(certFile, keyFile, clientCAFile string, expires func(time.Time)) (*tls.Config, error) {
	files := &tlsFiles{cert: certFile, key: keyFile, clientCA: clientCAFile, expires: expires}
	if _, err := files.config(nil); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: files.config}, nil
}

// tlsFiles makes the configuration of the files, anew once one of them changes. Files that can't be read or used (they may
// be half written) leave the configuration before in place.
type tlsFiles struct {
	cert, key string
	// clientCA is empty where clients need no certificate.
	clientCA string
	expires  func(time.Time)

	mu      sync.Mutex
	current *tls.Config
	// seen is what the files held that current was made of. Their times wouldn't do: those of two changes can be equal.
	seen   tlsContent
	looked time.Time
	// problem is what was last said of files that can't be used: it is said once.
	problem string
}

// tlsContent is what the files hold.
type tlsContent struct{ cert, key, clientCA string }

// config implements tls.Config's GetConfigForClient. It returns one and the same configuration while nothing changes,
// and with it lets clients resume sessions; none is resumed that an earlier CA admitted.
func (f *tlsFiles) config(*tls.ClientHelloInfo) (*tls.Config, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.current != nil && time.Since(f.looked) < tlsFilesAge {
		return f.current, nil
	}
	f.looked = time.Now()
	err := f.update()
	switch {
	case err == nil:
		f.problem = ""
	case f.current == nil:
		return nil, err
	case err.Error() != f.problem:
		f.problem = err.Error()
		klog.Background().Error(err, "The changed TLS files can't be used: the ones before still are")
	}
	return f.current, nil
}

// update reads the files, and makes a configuration of them where they aren't as before.
func (f *tlsFiles) update() error {
	content, err := f.read()
	if err != nil || f.current != nil && content == f.seen {
		return err
	}
	pair, err := tls.X509KeyPair([]byte(content.cert), []byte(content.key))
	if err != nil {
		return fmt.Errorf("--tls-cert-file, --tls-key-file: %w", err)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"}}
	if f.clientCA != "" {
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM([]byte(content.clientCA)) {
			return fmt.Errorf("--client-ca-file: no certificate in %s", f.clientCA)
		}
	}
	f.expires(expiry(parseChain(pair.Certificate)))
	f.current, f.seen = config, content
	return nil
}

// parseChain returns the certificates of a chain that can be read: tls.X509KeyPair has read the first.
func parseChain(raw [][]byte) []*x509.Certificate {
	var chain []*x509.Certificate
	for _, der := range raw {
		if cert, err := x509.ParseCertificate(der); err == nil {
			chain = append(chain, cert)
		}
	}
	return chain
}

// expiry returns when the first of the certificates expires. There is one at least.
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
	for _, file := range []struct {
		flags, path string
		into        *string
	}{
		{"--tls-cert-file, --tls-key-file", f.cert, &content.cert},
		{"--tls-cert-file, --tls-key-file", f.key, &content.key},
		{"--client-ca-file", f.clientCA, &content.clientCA},
	} {
		if file.path == "" {
			continue
		}
		text, err := os.ReadFile(file.path)
		if err != nil {
			return tlsContent{}, fmt.Errorf("%s: %w", file.flags, err)
		}
		*file.into = string(text)
	}
	return content, nil
}
