package nodee2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
)

// cutOffLeader drops all packets of the leader's pod, to and from it, while kube-scheduler has connections to it: nothing ends them, as
// when a machine loses its power or its network. The standby must bind the next pod. The time until then is reported; the bound is
// that of every wait, and below the quarter of an hour for which TCP sends again.
func (s *installation) cutOffLeader(t *testing.T) {
	t.Helper()
	s.awaitBudget(t)
	load := s.startLoad(t, "cut-off")
	before, err := s.leads(t.Context())
	check.Must(t, err)
	pod, err := s.Client.CoreV1().Pods("kube-system").Get(t.Context(), before.pod, metav1.GetOptions{})
	check.Must(t, err)
	framework.Eventually(t, "kube-scheduler has connections to the extender", func(context.Context) error {
		connected, err := connectedTo(pod.Spec.Containers[0].Ports[0].ContainerPort)
		if err == nil && !connected {
			err = errors.New("it has none")
		}
		return err
	})

	heal := dropPackets(t, pod.Status.PodIP)
	begun := time.Now()
	next := framework.MakePod("after-cut-off").GPUMem(1).GracePeriod(1)
	recordEnv(&next.Spec)
	pods := s.Client.CoreV1().Pods("default")
	_, err = pods.Create(t.Context(), next.Obj(), metav1.CreateOptions{})
	check.Must(t, err)
	framework.Eventually(t, "the standby binds a pod", func(ctx context.Context) error {
		now, err := pods.Get(ctx, next.Name, metav1.GetOptions{})
		if err == nil && now.Spec.NodeName == "" {
			err = errors.New("it is not bound")
		}
		return err
	})
	bound := time.Since(begun)
	after, err := s.leads(t.Context())
	check.Must(t, err)
	if after.pod == before.pod {
		t.Errorf("%s still leads", before.pod)
	}
	t.Logf("the next pod was bound %v after the leader's packets were dropped; the other replica took the Lease after %v",
		bound.Round(time.Millisecond), after.since.Sub(begun).Round(time.Millisecond))
	heal()
	for _, pod := range load(t) {
		t.Errorf("pod %s failed, %s: %s", pod.Name, pod.Status.Reason, pod.Status.Message)
	}
	s.awaitBudget(t)
}

// dropPackets drops the packets from and to an address in this process's network, until heal or the end of the test.
func dropPackets(t *testing.T, address string) (heal func()) {
	t.Helper()
	rules := []string{"INPUT -s", "OUTPUT -d", "FORWARD -s", "FORWARD -d"}
	change := func(ctx context.Context, action string) {
		t.Helper()
		for _, rule := range rules {
			args := append([]string{"--wait", action}, strings.Fields(rule+" "+address+" -j DROP")...)
			if out, err := exec.CommandContext(ctx, "iptables", args...).CombinedOutput(); err != nil {
				t.Fatalf("iptables %v: %v: %s", args, err, out)
			}
		}
	}
	change(t.Context(), "--insert")
	heal = sync.OnceFunc(func() { change(context.WithoutCancel(t.Context()), "--delete") })
	t.Cleanup(heal)
	return heal
}

// connectedTo reports whether a program of this network has a TCP connection to this port of an IPv4 address (man proc_net_tcp).
func connectedTo(port int32) (bool, error) {
	file, err := os.Open("/proc/self/net/tcp")
	if err != nil {
		return false, err
	}
	defer file.Close()
	remote := fmt.Sprintf(":%04X", port)
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		const established = "01"
		fields := strings.Fields(lines.Text())
		if len(fields) > 3 && strings.HasSuffix(fields[2], remote) && fields[3] == established {
			return true, nil
		}
	}
	return false, lines.Err()
}
