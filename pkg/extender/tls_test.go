package extender

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// authority is a CA.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir(), key: newKey(t)}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "a CA"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	a.cert = a.sign(template, template, &a.key.PublicKey)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check.Must(t, err)
	return key
}

func (a *authority) sign(template, parent *x509.Certificate, key *ecdsa.PublicKey) *x509.Certificate {
	a.t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key, a.key)
	check.Must(a.t, err)
	cert, err := x509.ParseCertificate(der)
	check.Must(a.t, err)
	return cert
}

// issue writes a certificate for the loopback address, valid for servers and clients, and returns its files.
func (a *authority) issue(name string, serial int64) (certFile, keyFile string) {
	a.t.Helper()
	key := newKey(a.t)
	cert := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, &key.PublicKey)
	der, err := x509.MarshalECPrivateKey(key)
	check.Must(a.t, err)
	return a.write(name+".crt", "CERTIFICATE", cert.Raw), a.write(name+".key", "EC PRIVATE KEY", der)
}

func (a *authority) caFile() string { return a.write("ca.crt", "CERTIFICATE", a.cert.Raw) }

func (a *authority) write(name, kind string, der []byte) string {
	a.t.Helper()
	path := filepath.Join(a.dir, name)
	writeFile(a.t, path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	return path
}

// written is the modification time of every file, whenever it was written: two changes can get the same time from a file
// system's clock.
var written = time.Unix(1_000_000_000, 0)

func writeFile(t *testing.T, path string, data []byte) {
	t.Helper()
	check.Must(t, os.WriteFile(path, data, 0o600))
	check.Must(t, os.Chtimes(path, written, written))
}

// client returns a client that trusts the CA, and presents a certificate if one is given. It keeps no connection open.
func (a *authority) client(certFile, keyFile string) *http.Client {
	a.t.Helper()
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AddCert(a.cert)
	if certFile != "" {
		pair, err := tls.LoadX509KeyPair(certFile, keyFile)
		check.Must(a.t, err)
		config.Certificates = []tls.Certificate{pair}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
}

// serverTLS returns the configuration of a server with a certificate of the CA. clientCA is the file of the CA for clients,
// empty if they need no certificate.
func (a *authority) serverTLS(clientCA string, expires func(time.Time)) *tls.Config {
	a.t.Helper()
	cert, key := a.issue("server", 2)
	config, err := ServerTLS(cert, key, clientCA, expires)
	check.Must(a.t, err)
	return config
}

func ignoreExpiry(time.Time) {}

func serveTLS(t *testing.T, config *tls.Config) serving {
	t.Helper()
	s := serve(t, newServer(&fakeScheduler{}, func(o *Options) { o.TLS = config }))
	t.Cleanup(func() {
		s.stop()
		s.wantEnd(t)
	})
	return s
}

// rejection returns the error that a client gets if it sends nothing after its handshake. The client's part of a handshake
// ends before the server has checked the certificate. A client that had already sent a request could get a connection reset
// instead of the reason.
func (s serving) rejection(client *http.Client) string {
	conn, err := tls.Dial("tcp", s.address, client.Transport.(*http.Transport).TLSClientConfig)
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second)) // An accepted client gets no answer either.
	_, err = conn.Read(make([]byte, 1))
	return err.Error()
}

func TestClientCertificate(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	s := serveTLS(t, ours.serverTLS(ours.caFile(), ignoreExpiry))
	url := "https://" + s.address + "/livez"

	if got := fetch(t, ours.client(ours.issue("scheduler", 3)), url); got != "ok\n" {
		t.Errorf("a client of the CA: %s", got)
	}
	if got := s.rejection(ours.client("", "")); !strings.Contains(got, "certificate required") {
		t.Errorf("a client without certificate: %s", got)
	}
	if got := s.rejection(ours.client(theirs.issue("other", 4))); !strings.Contains(got, "tls: ") {
		t.Errorf("a client of another CA: %s", got)
	}
	old := ours.client(ours.issue("scheduler", 5))
	old.Transport.(*http.Transport).TLSClientConfig.MaxVersion = tls.VersionTLS12
	if got := s.rejection(old); !strings.Contains(got, "protocol version") {
		t.Errorf("TLS 1.2: %s", got)
	}
	if got := fetch(t, http.DefaultClient, "http://"+s.address+"/livez"); got == "ok\n" {
		t.Errorf("plain HTTP: %s", got)
	}
}

// New connections use a changed certificate.
func TestCertificateReload(t *testing.T) {
	ca := newAuthority(t)
	s := serveTLS(t, ca.serverTLS("", ignoreExpiry))
	client := ca.client("", "")
	serial := func() int64 {
		response, err := client.Get("https://" + s.address + "/livez")
		check.Must(t, err)
		response.Body.Close()
		return response.TLS.PeerCertificates[0].SerialNumber.Int64()
	}
	if got := serial(); got != 2 {
		t.Fatalf("serial %d, want 2", got)
	}
	ca.issue("server", 3)
	await.True(t, "the new certificate", func() bool { return serial() == 3 })
}

// After the CA is replaced, clients of the new CA are admitted. Clients of the previous CA are not, even with a resumed
// session.
func TestClientCAReload(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	clientCA := filepath.Join(t.TempDir(), "clients.crt")
	admit := func(a *authority) {
		writeFile(t, clientCA, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}))
	}
	admit(ours)
	s := serveTLS(t, ours.serverTLS(clientCA, ignoreExpiry))
	url := "https://" + s.address + "/livez"
	// Both clients trust the server's CA, regardless of the CA of their own certificate.
	client := func(a *authority) *http.Client {
		c := ours.client(a.issue("client", 3))
		c.Transport.(*http.Transport).TLSClientConfig.ClientSessionCache = tls.NewLRUClientSessionCache(1)
		return c
	}
	before, after := client(ours), client(theirs)
	for range 2 { // The second connection resumes the session.
		if got := fetch(t, before, url); got != "ok\n" {
			t.Fatalf("a client of the first CA: %s", got)
		}
	}
	admit(theirs)
	await.True(t, "a client of the new CA is admitted", func() bool { return fetch(t, after, url) == "ok\n" })
	if got := fetch(t, before, url); got == "ok\n" {
		t.Error("a client of the previous CA is still admitted")
	}
}

// TestExpiryWithoutClients: a certificate that is replaced while no client connects is read by the kubelet's probe, and before metrics are.
func TestExpiryWithoutClients(t *testing.T) {
	for _, path := range []string{"/metrics", "/readyz"} {
		ca := newAuthority(t)
		expiries := 0
		config := ca.serverTLS("", func(time.Time) { expiries++ })
		h := newServer(&fakeScheduler{}, func(o *Options) { o.TLS = config }).HealthHandler()
		ca.issue("server", 3)
		await.True(t, path+" reads the new certificate", func() bool {
			get(h, path)
			return expiries == 2
		})
	}
}

// Files that can't be used, such as half of a change, leave the previous configuration in use.
func TestUnusableChange(t *testing.T) {
	ca := newAuthority(t)
	cert, key := ca.issue("server", 2)
	clientCA := ca.caFile()
	files := &tlsFiles{cert: cert, key: key, clientCA: clientCA, expires: ignoreExpiry}
	first, err := files.config(nil)
	check.Must(t, err)
	for name, spoil := range map[string]func(){
		"half written": func() { writeFile(t, cert, []byte("half of")) },
		"a broken CA":  func() { writeFile(t, clientCA, []byte("half of")) },
		"gone":         func() { os.Remove(cert) },
	} {
		spoil()
		files.readAt = time.Time{}
		if got, err := files.config(nil); err != nil || got != first {
			t.Errorf("%s: %p, %v, want the previous one", name, got, err)
		}
	}
	ca.issue("server", 4)
	ca.caFile()
	files.readAt = time.Time{}
	if got, err := files.config(nil); err != nil || got == first {
		t.Errorf("the complete change isn't used: %v", err)
	}
}

func TestUnusableFiles(t *testing.T) {
	ca := newAuthority(t)
	cert, key := ca.issue("server", 2)
	_, otherKey := ca.issue("other", 3)
	nowhere := filepath.Join(ca.dir, "nowhere")
	tests := map[string]struct{ cert, key, ca, want string }{
		"no certificate":                  {nowhere, key, "", "--tls-cert-file, --tls-key-file: open " + nowhere},
		"no key":                          {cert, nowhere, "", "--tls-cert-file, --tls-key-file: open " + nowhere},
		"the key of another certificate":  {cert, otherKey, "", "private key does not match public key"},
		"no CA":                           {cert, key, nowhere, "--client-ca-file: open " + nowhere},
		"a CA file without a certificate": {cert, key, key, "--client-ca-file: no certificate in " + key},
		"a certificate that is a key":     {key, key, "", "--tls-cert-file, --tls-key-file: tls: failed to find certificate"},
	}
	for name, test := range tests {
		if _, err := ServerTLS(test.cert, test.key, test.ca, ignoreExpiry); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}
