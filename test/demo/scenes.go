package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/testbed"
)

// card is the memory of the cards that the design's figures are drawn with, in MiB.
const card = 16276

// demo is the stage.
type demo struct {
	bed  *testbed.Bed
	dir  string
	node map[string]*testbed.Node
}

// nodes lets three nodes join.
func (d *demo) nodes(ctx context.Context) error {
	title("Three nodes of two cards join")
	for _, name := range []string{"n1", "n2", "n3"} {
		if err := d.join(ctx, name, card, card); err != nil {
			return err
		}
		say("  %s: its device plugin found two cards of %d MiB and reported aliyun.com/gpu-mem=%d, aliyun.com/gpu-count=2", name, card, 2*card)
	}
	return nil
}

// filter plays the design's filter figure.
func (d *demo) filter(ctx context.Context) error {
	title("Filter: which node has room on ONE card?")
	for _, filler := range []struct {
		name, node string
		memory     int64
	}{
		{"n1-a", "n1", 16276}, {"n1-b", "n1", 12207},
		{"n2-a", "n2", 12207}, {"n2-b", "n2", 12207},
		{"n3-a", "n3", 16276}, {"n3-b", "n3", 8138},
	} {
		if _, err := d.run(ctx, pod(filler.name, filler.memory).on(filler.node)); err != nil {
			return err
		}
	}
	say("  Free in n1: 4069 MiB on one card. In n2: 4069 + 4069. In n3: 8138 on one card.")
	say("  Now a pod asks for 8138 MiB, and may only go to n2:")
	only, err := d.create(ctx, pod("only-n2", 8138).on("n2"))
	if err != nil {
		return err
	}
	message, err := d.refused(ctx, only)
	if err != nil {
		return err
	}
	say("    Pending: %s", message)
	if err := contains(message, placement.Full.String()); err != nil {
		return err
	}
	say("  The sum of n2 would do, and kube-scheduler alone would have bound it there; the extender knows better.")
	if err := d.delete(ctx, only); err != nil {
		return err
	}
	say("  The same pod, free to choose:")
	bound, err := d.run(ctx, pod("anywhere", 8138))
	if err != nil {
		return err
	}
	return d.expect(bound, "n3", 1, "n1 lacks the sum, n2 has it on no single card, n3 has it on card 1")
}

// bind plays the design's bind figure.
func (d *demo) bind(ctx context.Context) error {
	title("Bind: which card of the node?")
	if err := d.join(ctx, "n4", card, card, card, card); err != nil {
		return err
	}
	say("  A node n4 of four cards joins, and is filled until 12207, 8138, 4069 and 16276 MiB are free.")
	// Each pair fills a card, so that binpack moves on to the next one; the second of each then leaves.
	var leaving []*corev1.Pod
	for i, memory := range []int64{4069, 8138, 12207} {
		if _, err := d.run(ctx, pod(fmt.Sprintf("n4-stays-%d", i), memory).on("n4")); err != nil {
			return err
		}
		filler, err := d.run(ctx, pod(fmt.Sprintf("n4-leaves-%d", i), card-memory).on("n4"))
		if err != nil {
			return err
		}
		leaving = append(leaving, filler)
	}
	for _, filler := range leaving {
		if err := d.delete(ctx, filler); err != nil {
			return err
		}
	}
	bound, err := d.run(ctx, pod("best-card", 8138).on("n4"))
	if err != nil {
		return err
	}
	return d.expect(bound, "n4", 1, "of the cards that fit (0, 1 and 3) it has the least left: binpack keeps card 3 whole")
}

// allocate shows that containers get what the scheduler wrote.
func (d *demo) allocate(ctx context.Context) error {
	title("Allocate: what the scheduler wrote is what the container gets")
	say("  Three pods of one size at once; the kubelet doesn't tell the device plugin which pod it is serving:")
	var pods []*corev1.Pod
	for i := range 3 {
		created, err := d.create(ctx, pod(fmt.Sprintf("same-size-%d", i), 4000).on("n4"))
		if err != nil {
			return err
		}
		pods = append(pods, created)
	}
	for _, created := range pods {
		running, err := d.running(ctx, created)
		if err != nil {
			return err
		}
		env := d.node["n4"].Env(running, "main")
		say("    %s: annotation %s=%s, container %s=%s %s=%s, %s=%q", running.Name,
			protocol.AnnotationIndex, running.Annotations[protocol.AnnotationIndex],
			protocol.AnnotationIndex, env[protocol.AnnotationIndex], protocol.EnvVisibleDevices, env[protocol.EnvVisibleDevices],
			protocol.AnnotationAssigned, running.Annotations[protocol.AnnotationAssigned])
		if err := agree(running, env); err != nil {
			return err
		}
	}
	return nil
}

// full shows that a pod waits, and goes when room comes.
func (d *demo) full(ctx context.Context) error {
	title("No room anywhere: the pod waits, and is told why")
	last, err := d.run(ctx, pod("last-card", card).on("n4"))
	if err != nil {
		return err
	}
	// n2 has 4069 + 4069 free: enough by the sum, not on one card. Nobody else has the sum.
	waiting, err := d.create(ctx, pod("waiting", 5000))
	if err != nil {
		return err
	}
	message, err := d.refused(ctx, waiting)
	if err != nil {
		return err
	}
	say("    Pending: %s", message)
	if err := contains(message, placement.Full.String()); err != nil {
		return err
	}
	say("  The pod on the last whole card ends ...")
	start := time.Now()
	if err := d.delete(ctx, last); err != nil {
		return err
	}
	bound, err := d.running(ctx, waiting)
	if err != nil {
		return err
	}
	say("    bound %.1f s after the other one was deleted", time.Since(start).Seconds())
	return d.expect(bound, "n4", 3, "the card that came free")
}

// table prints what people look at.
func (d *demo) table(ctx context.Context) error {
	title("kubectl inspect gpushare")
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, filepath.Join(root, "bin", "kubectl-inspect-gpushare"), "--kubeconfig="+d.bed.KubeconfigPath)
	command.Stdout, command.Stderr = os.Stdout, os.Stderr
	if err := command.Run(); err != nil {
		return fmt.Errorf("kubectl inspect gpushare: %w", err)
	}
	return nil
}

func (d *demo) join(ctx context.Context, name string, cards ...uint64) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	node, err := d.bed.AddNode(ctx, testbed.NodeSpec{Name: name, Cards: cards})
	if err != nil {
		return err
	}
	if d.node == nil {
		d.node = map[string]*testbed.Node{}
	}
	d.node[name] = node
	return nil
}

func title(text string) { say("\n== %s", text) }
