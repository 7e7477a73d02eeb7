package deviceplugin

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// stubUsage is a driver with one card, which a process uses that doesn't exist.
type stubUsage struct{}

func (stubUsage) Cards() []string                              { return []string{"GPU-0"} }
func (stubUsage) Memory(string) (used, free uint64, err error) { return 50, 1000, nil }
func (stubUsage) Limits() bool                                 { return false }
func (stubUsage) Compute(string) (inventory.Compute, error) {
	return inventory.Compute{}, inventory.ErrUnsupported
}
func (stubUsage) Processes(string) ([]inventory.Process, error) {
	return []inventory.Process{{PID: 1 << 30, Bytes: 9}}, nil
}
func (stubUsage) Limit(string, string) (inventory.MemoryLimit, error) {
	return inventory.MemoryLimit{}, inventory.ErrUnsupported
}

// TestUsage checks that measured use, with the containers that were given a card, is served as JSON and as metrics. Package usage
// tests the measurement.
func TestUsage(t *testing.T) {
	given, other := newPod("given", main(2), ran(true)), newPod("other", main(0), ran(true))
	b := newFixture(t)
	p, err := New(Options{Client: fakeClient(b.client), Events: b.events, NodeName: testNode, Directory: b.dir, UsageMetrics: true})
	check.Must(t, err)
	p.SetCards(gpu.GiB, []gpu.Card{{Index: 0, UUID: "GPU-0", Memory: 16}}, nil, nil, "")
	for _, pod := range []any{given, other} {
		info, err := transformPod(pod)
		check.Must(t, err)
		check.Must(t, p.pods.informer.GetStore().Add(info))
	}
	p.allocator.snapshots.record.Add(allocation.ContainerKey{UID: "uid-given", Name: "main"}, giveOne(0, 2))
	p.Measure(stubUsage{})

	server := httptest.NewServer(p.usageHandler())
	defer server.Close()
	response, err := http.Get(server.URL + "/usage")
	check.Must(t, err)
	defer response.Body.Close()
	var got protocol.Usage
	check.Must(t, json.NewDecoder(response.Body).Decode(&got))
	want := []protocol.ContainerUsage{{Namespace: "default", Pod: "given", UID: "uid-given", Container: "main", Requested: 2 << 30}}
	check.Equal(t, "containers", want, got.Containers)
	check.Equal(t, "cards", []protocol.CardUsage{{UUID: "GPU-0", Used: 50, Free: new(uint64(1000)), Unresolved: 9, Incomplete: true}}, got.Cards)

	metrics := func() string {
		recorder := httptest.NewRecorder()
		p.handler().ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		return recorder.Body.String()
	}
	for _, line := range []string{
		`gpushare_device_plugin_container_memory_requested_bytes{card="0",container="main",namespace="default",pod="given"} 2.147483648e+09`,
		`gpushare_device_plugin_container_memory_used_bytes{card="0",container="main",namespace="default",pod="given"} 0`,
		`gpushare_device_plugin_card_memory_used_bytes{by="pods",card="0"} 0`,
	} {
		if !strings.Contains(metrics(), line+"\n") {
			t.Errorf("the metrics lack %s", line)
		}
	}
}

// TestMeasureEarly: the driver is visited before the plugin knows the cards, the pods and what these were given. Nothing follows from
// such a visit: above all no pod loses the annotation that an earlier plugin wrote.
func TestMeasureEarly(t *testing.T) {
	p, _ := newFixture(t).start(nil)
	measured := func(want bool) {
		t.Helper()
		p.Measure(stubUsage{})
		if _, got := p.overuse.Annotation("uid-a"); got != want || p.meter.Report().Time.IsZero() == want {
			t.Errorf("over-use is known: %t, want %t; the report: %+v", got, want, p.meter.Report())
		}
	}
	measured(false)
	p.SetCards(gpu.GiB, newCards(16), nil, nil, "")
	measured(true)
}

func TestUsageMetricsOff(t *testing.T) {
	p, _ := newFixture(t).start(newCards(16))
	p.Measure(stubUsage{})
	recorder := httptest.NewRecorder()
	p.handler().ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if text := recorder.Body.String(); strings.Contains(text, "_container_memory_") || !strings.Contains(text, "usage_timestamp_seconds") {
		t.Errorf("metrics that name pods are served without being switched on, or others are missing:\n%s", text)
	}
}

func TestUsageOnLoopbackOnly(t *testing.T) {
	for address, allowed := range map[string]bool{"127.0.0.1:0": true, "[::1]:0": true, "": true, ":0": false, "0.0.0.0:0": false} {
		listener, err := listenLoopback(t.Context(), address)
		if address == "[::1]:0" && err != nil && !strings.Contains(err.Error(), "not a loopback") {
			continue // This machine has no IPv6.
		}
		if (err == nil) != allowed {
			t.Errorf("%q: %v", address, err)
		}
		if listener != nil {
			check.NoError(t, listener.Close())
		}
	}
}
