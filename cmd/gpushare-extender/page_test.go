package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/check"
)

// TestPage checks that the page is served at --ui-listen-address only, and the verbs at --listen-address only.
func TestPage(t *testing.T) {
	wantStatus := func(t *testing.T, client *http.Client, url string, want int) {
		t.Helper()
		if got, _, err := get(client, url); err != nil || got != want {
			t.Errorf("%s: status %d (%v), want %d", url, got, err, want)
		}
	}
	plain := http.DefaultClient
	for _, off := range []string{"--ui-listen-address=", "--ui=false"} {
		t.Run("nowhere, by "+off, func(t *testing.T) {
			p := startExtender(t, 1, off)
			for _, path := range []string{"/ui", "/ui/", "/ui/data.json"} {
				wantStatus(t, plain, "http://"+p.verbs+path, 404)
			}
			wantStatus(t, plain, "http://"+p.verbs+"/livez", 200)
		})
	}
	t.Run("at an address of its own, with nothing else", func(t *testing.T) {
		p := startExtender(t, 2, "--ui-listen-address=127.0.0.1:0")
		wantStatus(t, plain, "http://"+p.page+"/ui/", 200)
		wantStatus(t, plain, "http://"+p.page+"/ui/data.json", 200)
		wantStatus(t, plain, "http://"+p.verbs+"/ui/", 404)
		for _, path := range []string{"/gpushare-scheduler/inspect", "/gpushare-scheduler/bind", "/metrics", "/debug/pprof/"} {
			wantStatus(t, plain, "http://"+p.page+path, 404)
		}
	})
	t.Run("nowhere where another program has the default port", func(t *testing.T) {
		if taken, err := net.Listen("tcp", "127.0.0.1:12346"); err == nil { // Otherwise another process already uses it.
			defer taken.Close()
		}
		p := startExtender(t, 1)
		wantStatus(t, plain, "http://"+p.verbs+"/livez", 200)
		wantStatus(t, plain, "http://"+p.verbs+"/ui/", 404)
	})
	t.Run("where the verbs ask for a certificate, only at its own address", func(t *testing.T) {
		cert, key := writeCertificate(t, time.Now().Add(time.Hour))
		p := startExtender(t, 2, "--tls-cert-file="+cert, "--tls-key-file="+key, "--client-ca-file="+cert, "--ui-listen-address=127.0.0.1:0")
		roots := x509.NewCertPool()
		text, err := os.ReadFile(cert)
		if err != nil || !roots.AppendCertsFromPEM(text) {
			t.Fatal("no certificate", err)
		}
		client := func(certificates ...tls.Certificate) *http.Client {
			transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certificates}}
			t.Cleanup(transport.CloseIdleConnections)
			return &http.Client{Transport: transport}
		}
		browser := client()
		wantStatus(t, browser, "https://"+p.page+"/ui/", 200)
		for _, path := range []string{"/ui/", "/gpushare-scheduler/inspect"} {
			if got, _, err := get(browser, "https://"+p.verbs+path); err == nil {
				t.Errorf("the verbs' address answers %s without a certificate: %d", path, got)
			}
		}
		pair, err := tls.LoadX509KeyPair(cert, key)
		check.Must(t, err)
		scheduler := client(pair)
		wantStatus(t, scheduler, "https://"+p.verbs+"/ui/", 404)
		wantStatus(t, scheduler, "https://"+p.verbs+"/livez", 200)
	})
}

// TestExpiredCertificate: the extender says at its start that kube-scheduler will reject its certificate.
func TestExpiredCertificate(t *testing.T) {
	cert, key := writeCertificate(t, time.Now().Add(-time.Hour))
	p := startExtender(t, 1, "--tls-cert-file="+cert, "--tls-key-file="+key, "--ui-listen-address=")
	check.Must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if logs := p.wait(); !strings.Contains(logs, "The extender's certificate is not valid now") || !strings.Contains(logs, cert) {
		t.Errorf("it logs:\n%s", logs)
	}
}

// writeCertificate writes a self-signed certificate for server and client.
func writeCertificate(t *testing.T, expires time.Time) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check.Must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: expires, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	check.Must(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	check.Must(t, err)
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(t.TempDir(), name)
		check.Must(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	return write("tls.crt", "CERTIFICATE", cert), write("tls.key", "PRIVATE KEY", secret)
}
