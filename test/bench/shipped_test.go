package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

func TestNewReplica(t *testing.T) {
	args := []string{
		"--listen-address=:12345", "--health-address=:12347", "--ui-listen-address=127.0.0.1:12346", "--leader-elect",
		"--advertise-address=$(POD_IP)", "--tls-cert-file=/tls/tls.crt", "--bind-timeout=4s",
	}
	r, err := newReplica(1, args, "/certificates")
	check.Must(t, err)
	for i, want := range []string{
		"--listen-address=" + strings.TrimPrefix(r.url, "https://"), "--health-address=" + strings.TrimPrefix(r.health, "http://"),
		"--ui-listen-address=" + r.ports[2].Address(), "--leader-elect",
		"--advertise-address=192.0.2.2", "--tls-cert-file=/certificates/tls.crt", "--bind-timeout=4s",
	} {
		if r.args[i] != want {
			t.Errorf("argument %s became %s, want %s", args[i], r.args[i], want)
		}
	}
	for _, port := range r.ports {
		port.Release()
	}
	if _, err := newReplica(0, slices.Delete(args, 1, 2), "/certificates"); err == nil {
		t.Error("a Deployment without a health address is accepted")
	}
}
