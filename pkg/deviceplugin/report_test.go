package deviceplugin

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

func TestConditionSince(t *testing.T) {
	unhealthy := func(reasons ...string) condition {
		cards := newCards(make([]gpu.Memory, len(reasons))...)
		for i, reason := range reasons {
			cards[i].Unhealthy = reason
		}
		return conditionOf(cards, nil)
	}
	for name, test := range map[string]struct {
		before, now condition
		want        []string
	}{
		"all healthy":              {condition{}, unhealthy("", ""), nil},
		"cards are not known yet":  {condition{}, conditionOf(nil, errNoCardsYet), nil},
		"unhealthy from the start": {condition{}, unhealthy("", "Xid 79"), []string{"Warning GPUCardUnhealthy card 1 GPU-1: Xid 79"}},
		"still unhealthy":          {unhealthy("", "Xid 79"), unhealthy("", "Xid 79"), nil},
		"another reason":           {unhealthy("", "Xid 79"), unhealthy("", "Xid 48"), []string{"Warning GPUCardUnhealthy card 1 GPU-1: Xid 48"}},
		"one fails, one recovers": {unhealthy("", "Xid 79"), unhealthy("Xid 48", ""), []string{
			"Normal GPUCardHealthy card 1 GPU-1 can be used again", "Warning GPUCardUnhealthy card 0 GPU-0: Xid 48",
		}},
		"cards with one reason share an Event": {unhealthy("", "Xid 79", ""), unhealthy("the driver is away", "Xid 79", "the driver is away"), []string{
			"Warning GPUCardUnhealthy card 0 GPU-0, 2 GPU-2: the driver is away",
		}},
		"not offered": {unhealthy(""), conditionOf(newCards(1), errors.New("too many")), []string{"Warning GPUCardNotOffered too many"}},
		"offered again": {conditionOf(newCards(1), errors.New("too many")), unhealthy(""), []string{
			"Normal GPUCardOffered the node's GPU memory is offered to the kubelet now",
		}},
		"a card without a UUID": {condition{}, conditionOf([]gpu.Card{{Index: 7, Unhealthy: "it doesn't answer"}}, nil), []string{
			"Warning GPUCardUnhealthy card 7: it doesn't answer",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, n := range test.now.since(test.before) {
				got = append(got, fmt.Sprintf("%s %s %s", n.kind, n.reason, n.text))
			}
			check.Equal(t, "the result", test.want, got)
		})
	}
}

func TestRegistrationRefused(t *testing.T) {
	b := newFixture(t)
	b.absence = time.Millisecond
	k := startKubelet(t, b.dir)
	k.refuses = status.Error(codes.InvalidArgument, "no such version")
	p, _ := b.start(newCards(16))
	b.awaitEvent("registering with the kubelet: rpc error: code = InvalidArgument desc = no such version")
	k.mu.Lock()
	k.refuses = nil
	k.mu.Unlock()
	k.awaitDevices(16, 16)
	if n := len(b.events.Events); n > 0 {
		t.Errorf("%d more Events with the same text", n)
	}
	await.True(t, "ready", func() bool { return len(p.missing()) == 0 })
}

// TestNoKubelet: a wrong directory isn't only in the log.
func TestNoKubelet(t *testing.T) {
	b := newFixture(t)
	b.absence = time.Millisecond
	b.start(newCards(16))
	b.awaitEvent("GPUCardNotOffered no kubelet has taken the plugin in " + b.dir + " for 1ms: the kubelet is down or refuses the plugin, or " +
		"--device-plugin-dir is not its directory: looking for the kubelet: ")
	startKubelet(t, b.dir).awaitDevices(16, 16)
	if n := len(b.events.Events); n > 0 {
		t.Errorf("%d more Events", n)
	}
}

// TestNoPodResources: a wrong directory of the PodResources socket is reported once. The plugin works, but can take one pod for another.
func TestNoPodResources(t *testing.T) {
	b := newFixture(t)
	b.absence, b.socket = time.Millisecond, filepath.Join(b.dir, "elsewhere", "kubelet.sock")
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16))
	k.awaitDevices(16, 16)
	b.awaitEvent("GPUKubeletNotAsked the kubelet has no socket " + b.socket + ", so the plugin can't ask which pod it starts, and can take one for another: " +
		"--pod-resources-socket must be in pod-resources of the kubelet's --root-dir")
	one := newPod("one", main(4), assumed(0, 1))
	b.create(p, one)
	k.mustAdmit(one)
	b.awaitAssigned("one", 0)
	for len(b.events.Events) > 0 {
		if event := <-b.events.Events; strings.Contains(event, "GPUKubeletNotAsked") {
			t.Errorf("a second Event: %s", event)
		}
	}
}
