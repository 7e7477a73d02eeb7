package deviceplugin

import (
	"bytes"
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// driverOf returns the DRA driver in the node's inventory; "none" if there is no inventory yet.
func (b *fixture) driverOf() string {
	inventory, err := protocol.ParseInventory(b.node().Annotations)
	if err != nil {
		return "none"
	}
	return inventory.DRADriver
}

func TestDRADriver(t *testing.T) {
	b := newFixture(t)
	b.slices = fakeSlices(&metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: sliceResource.GroupVersion().String(), Kind: "ResourceSlice"}, ObjectMeta: metav1.ObjectMeta{Name: "cards"},
	})
	selectors := make(chan string, 10)
	b.slices.PrependReactor("list", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		selectors <- action.(clienttesting.ListAction).GetListRestrictions().Fields.String()
		return false, nil, nil
	})
	b.up(16)
	b.awaitEvent("GPUCardSharedTwice the node offers ResourceSlices of gpu.nvidia.com and aliyun.com/gpu-mem at once")
	await.True(t, "the driver in the inventory", func() bool { return b.driverOf() == protocol.DRADriver })
	if got, want := <-selectors, "spec.driver=gpu.nvidia.com,spec.nodeName="+testNode; got != want {
		t.Errorf("the plugin lists the ResourceSlices of %q, want %q", got, want)
	}
	// The kubelet deletes a driver's ResourceSlices when the driver is removed.
	check.Must(t, b.slices.Tracker().Delete(sliceResource, "", "cards"))
	await.True(t, "an inventory without the driver", func() bool { return b.driverOf() == "" })
}

// TestDRADriverUnknown: what the node had before counts until ResourceSlices can be read.
func TestDRADriverUnknown(t *testing.T) {
	resource := sliceResource.GroupResource()
	for name, test := range map[string]struct {
		answer error
		want   string
	}{
		"the plugin may not read them":      {apierrors.NewForbidden(resource, "", nil), protocol.DRADriver},
		"the API server doesn't answer yet": {apierrors.NewServiceUnavailable("starting"), protocol.DRADriver},
		"the driver is gone":                {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			b.slices = fakeSlices()
			b.slices.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
				return test.answer != nil, nil, test.answer
			})
			node := b.node()
			annotation, err := protocol.Inventory{Unit: 1 << 30, DRADriver: protocol.DRADriver}.Annotation()
			check.Must(t, err)
			node.Annotations = map[string]string{protocol.AnnotationInventory: annotation}
			check.Must(t, b.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), node, ""))
			b.up(16)
			await.True(t, "the driver "+test.want+" in the inventory of the card", func() bool {
				inventory, err := protocol.ParseInventory(b.node().Annotations)
				return err == nil && len(inventory.Cards) == 1 && inventory.DRADriver == test.want
			})
		})
	}
}

// TestNoResourceSlices: an API server without ResourceSlices is asked again and again, and the log doesn't repeat that. It has other errors.
func TestNoResourceSlices(t *testing.T) {
	resource := sliceResource.GroupResource()
	for name, test := range map[string]struct {
		answer error
		logged bool
	}{
		"without ResourceSlices": {apierrors.NewNotFound(resource, ""), false},
		"forbidden":              {apierrors.NewForbidden(resource, "", nil), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, lists := fakeSlices(), make(chan struct{}, 10)
			client.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
				lists <- struct{}{}
				return true, nil, test.answer
			})
			informer, err := newSliceInformer(client.Resource(sliceResource), testNode, func() {})
			check.Must(t, err)
			var log bytes.Buffer
			ctx, end := context.WithCancel(klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))))
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				informer.RunWithContext(ctx)
			}()
			<-lists
			<-lists // The error of the first one was handled.
			end()
			<-ended
			if got := strings.Contains(log.String(), "Failed to watch"); got != test.logged {
				t.Errorf("logged %t, want %t: %s", got, test.logged, log.String())
			}
		})
	}
}
