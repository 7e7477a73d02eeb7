package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// card is the memory of the cards in MiB, as in the figures of the gpushare design.
const card = 16276

// demo holds the state that the steps share.
type demo struct {
	cluster *framework.Cluster
	node    map[string]*framework.Node
}

// nodes adds three nodes.
func (d *demo) nodes(ctx context.Context) error {
	title("Add three nodes with two cards each")
	for _, name := range []string{"n1", "n2", "n3"} {
		if err := d.join(ctx, name, card, card); err != nil {
			return err
		}
		say("  %s: the device plugin found two cards of %d MiB and reported aliyun.com/gpu-mem=%d and aliyun.com/gpu-count=2", name, card, 2*card)
	}
	return nil
}

// shareCard shows two pods that share a card.
func (d *demo) shareCard(ctx context.Context) error {
	title("Two pods share a card")
	say("  Create two pods that ask for 8000 MiB and for 4000 MiB on n1:")
	return d.showOn(ctx, "n1", []placed{
		{pod("first", 8000), "0", "both cards are free"},
		{pod("second", 4000), "0", "both cards fit; binpack chooses the one with the least free memory"},
	})
}

// guard shows that a request in the wrong unit is refused.
func (d *demo) guard(ctx context.Context) error {
	title("The guard: a request of 2Gi, which would be 2147483648 units, is refused")
	p := pod("wrong-unit", 0)
	p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{protocol.ResourceMemory: resource.MustParse("2Gi")}
	// The API server enforces a policy some moments after it was created.
	return d.poll(ctx, "the guard should refuse the pod", func(ctx context.Context) (bool, error) {
		_, err := d.cluster.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, p.Obj(), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if apierrors.IsInvalid(err) {
			say("    %v", err)
		}
		return apierrors.IsInvalid(err), nil
	})
}

// filter shows the filter phase, with the figures of the gpushare design.
func (d *demo) filter(ctx context.Context) error {
	title("Filter: which nodes have a card with enough free memory?")
	for _, filler := range []struct {
		name, node string
		memory     int64
	}{
		{"n1-a", "n1", 16276}, {"n1-b", "n1", 12807},
		{"n2-a", "n2", 12207}, {"n2-b", "n2", 12207},
		{"n3-a", "n3", 16276}, {"n3-b", "n3", 8138},
	} {
		if _, err := d.run(ctx, pod(filler.name, filler.memory).OnNode(filler.node)); err != nil {
			return err
		}
	}
	say("  Free memory: n1: 3469 MiB on one card; n2: 4069 MiB on each of two cards; n3: 8138 MiB on one card.")
	say("  Create a pod that requests 8138 MiB and may run only on n2:")
	only, err := d.create(ctx, pod("only-n2", 8138).OnNode("n2"))
	if err != nil {
		return err
	}
	message, err := d.rejected(ctx, only)
	if err != nil {
		return err
	}
	say("    Pending: %s", message)
	if err := contains(message, reasons.Full.Text()); err != nil {
		return err
	}
	say("  In total n2 has enough free memory, so kube-scheduler alone would bind the pod there. No single card has")
	say("  enough, so the extender rejects the node.")
	if err := d.delete(ctx, only); err != nil {
		return err
	}
	say("  Create the same pod without the restriction:")
	bound, err := d.run(ctx, pod("anywhere", 8138))
	if err != nil {
		return err
	}
	return d.expect(bound, "n3", "1", "the only card with 8138 MiB free")
}

// bind shows the bind phase, with the figures of the gpushare design.
func (d *demo) bind(ctx context.Context) error {
	title("Bind: which card of the node does the pod get?")
	if err := d.join(ctx, "n4", card, card, card, card); err != nil {
		return err
	}
	say("  Add node n4 with four cards. Other pods leave 12207, 8138, 4069 and 16276 MiB free on cards 0 to 3.")
	// Each pair of pods fills a card, so that binpack continues with the next one. Then the second pod of each pair is
	// deleted.
	var leaving []*corev1.Pod
	for i, memory := range []int64{4069, 8138, 12207} {
		if _, err := d.run(ctx, pod(fmt.Sprintf("n4-stays-%d", i), memory).OnNode("n4")); err != nil {
			return err
		}
		filler, err := d.run(ctx, pod(fmt.Sprintf("n4-leaves-%d", i), card-memory).OnNode("n4"))
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
	bound, err := d.run(ctx, pod("best-card", 8138).OnNode("n4"))
	if err != nil {
		return err
	}
	return d.expect(bound, "n4", "1", "cards 0, 1 and 3 fit; binpack chooses the one with the least free memory")
}

// allocate shows that containers get the card in their pod's annotation.
func (d *demo) allocate(ctx context.Context) error {
	title("Allocate: the container gets the card that the extender chose")
	say("  Create three pods of equal size. The kubelet's Allocate call doesn't name the pod, so the device plugin finds it:")
	var pods []*corev1.Pod
	for i := range 3 {
		created, err := d.create(ctx, pod(fmt.Sprintf("same-size-%d", i), 4000).OnNode("n4"))
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

// full shows that a pod stays pending until memory is freed.
func (d *demo) full(ctx context.Context) error {
	title("No card has room: the pod stays pending, with the reason")
	last, err := d.run(ctx, pod("last-card", card).OnNode("n4"))
	if err != nil {
		return err
	}
	// n2 has 4069 MiB free on each card, in total enough for the pod. No other node has enough in total.
	pending, err := d.create(ctx, pod("pending", 5000))
	if err != nil {
		return err
	}
	message, err := d.rejected(ctx, pending)
	if err != nil {
		return err
	}
	say("    Pending: %s", message)
	if err := contains(message, reasons.Full.Text()); err != nil {
		return err
	}
	say("  Delete the pod on card 3 of n4 ...")
	start := time.Now()
	if err := d.delete(ctx, last); err != nil {
		return err
	}
	bound, err := d.running(ctx, pending)
	if err != nil {
		return err
	}
	say("    The pending pod was bound and running %.1f s after the deletion.", time.Since(start).Seconds())
	return d.expect(bound, "n4", "3", "the freed card")
}

// several shows a pod over two cards, and pods with a share of computing.
func (d *demo) several(ctx context.Context) error {
	title("Several cards for one pod, and a share of computing")
	say("  n2 has 4069 MiB free on each of its two cards. Create a pod of 4000 MiB over two cards, and two pods of 1000 MiB that ask for")
	say("  60%% of a card's computing:")
	return d.showOn(ctx, "n2", []placed{
		{pod("two-cards", 4000).Cards(2), "0,1", "2000 MiB on each of them"},
		{pod("cores-a", 1000).Cores(60), "0", "both cards fit; of equal ones the first is chosen"},
		{pod("cores-b", 1000).Cores(60), "1", "card 0 has more memory in use and room for 1069 MiB, but only 40% of its computing left"},
	})
}

// placed is a pod, the cards that it must get, and the reason.
type placed struct {
	pod        *framework.PodWrapper
	cards, why string
}

// showOn runs the pods on a node and prints what their containers get. It leaves the node as it was.
func (d *demo) showOn(ctx context.Context, node string, wanted []placed) error {
	var pods []*corev1.Pod
	for _, want := range wanted {
		running, err := d.run(ctx, want.pod.OnNode(node))
		if err != nil {
			return err
		}
		pods = append(pods, running)
		if err := d.expect(running, node, want.cards, want.why); err != nil {
			return err
		}
		say("      its container has %s", d.variables(running))
	}
	if err := d.inspect(ctx, node, "-d"); err != nil {
		return err
	}
	for _, pod := range pods {
		if err := d.delete(ctx, pod); err != nil {
			return err
		}
	}
	return nil
}

// variables returns what the environment of a pod's container says about its cards.
func (d *demo) variables(pod *corev1.Pod) string {
	env := d.node[pod.Spec.NodeName].Env(pod, "main")
	var out []string
	for _, name := range []string{protocol.EnvVisibleDevices, protocol.AnnotationIndex, protocol.EnvContainer, protocol.EnvCores} {
		if value, ok := env[name]; ok {
			out = append(out, name+"="+value)
		}
	}
	return strings.Join(out, " ")
}

// table prints the output of kubectl inspect gpushare.
func (d *demo) table(ctx context.Context) error {
	title("kubectl inspect gpushare")
	return d.inspect(ctx)
}

func (d *demo) inspect(ctx context.Context, args ...string) error {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, filepath.Join(root, "bin", "kubectl-inspect-gpushare"), append(args, "--kubeconfig="+d.cluster.KubeconfigPath)...)
	command.Stdout, command.Stderr = os.Stdout, os.Stderr
	if err := command.Run(); err != nil {
		return fmt.Errorf("kubectl inspect gpushare: %w", err)
	}
	return nil
}

func (d *demo) join(ctx context.Context, name string, cards ...uint64) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	node, err := d.cluster.AddNode(ctx, framework.NodeSpec{Name: name, Cards: cards})
	if err != nil {
		return err
	}
	if d.node == nil {
		d.node = map[string]*framework.Node{}
	}
	d.node[name] = node
	return nil
}

func title(text string) { say("\n== %s", text) }
