package main

import (
	"context"
	"fmt"
	"maps"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

const (
	cardMemory gpu.Memory = 16276
	// creators is the number of concurrent creations.
	creators = 32
	// perNamespace is the number of pods in a namespace.
	perNamespace = 500
)

// populate creates the nodes, and pods that are already bound to a node and a card.
func populate(ctx context.Context, plane *controlplane.ControlPlane, o options) error {
	var nodes []*corev1.Node
	for i := range o.nodes {
		nodes = append(nodes, framework.MakeNode(nodeName(i)).Cards(o.cards, int64(cardMemory)).Obj())
	}
	if err := plane.CreateNodes(ctx, nodes...); err != nil {
		return err
	}
	config := rest.CopyConfig(plane.Config)
	config.ContentType = runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	for i := 0; i < o.pods; i += perNamespace {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespaceName(i)}}
		if _, err := client.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	g, creating := errgroup.WithContext(ctx)
	g.SetLimit(creators)
	for i := range o.pods {
		g.Go(func() error {
			_, err := client.CoreV1().Pods(namespaceName(i)).Create(creating, newPod(i, o), metav1.CreateOptions{})
			return err
		})
	}
	return g.Wait()
}

func nodeName(i int) string      { return fmt.Sprintf("node-%05d", i) }
func namespaceName(i int) string { return fmt.Sprintf("team-%03d", i/perNamespace) }

// newPod returns a pod with a typical spec. Every card gets one of half its size, the first cards two.
func newPod(i int, o options) *corev1.Pod {
	request := cardMemory / 2
	set := fmt.Sprintf("training-%06d", i/10)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s-%05d", set, i), Namespace: namespaceName(i),
			Labels: map[string]string{
				"app.kubernetes.io/name": "training", "app.kubernetes.io/instance": set, "pod-template-hash": fmt.Sprintf("%08x", i/10),
			},
			Annotations: map[string]string{"prometheus.io/scrape": "true", "prometheus.io/port": "8080"},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "apps/v1", Kind: "ReplicaSet", Name: set, UID: "5f0a5dcb-7d36-4a52-9d2b-2d1d4f0b8d11", Controller: new(true),
			}},
		},
		Spec: corev1.PodSpec{
			NodeName: nodeName(i % o.nodes),
			Containers: []corev1.Container{{
				Name: "main", Image: "registry.example/team/training:v1.2.3", Command: []string{"/usr/bin/train", "--epochs=100"},
				Env: []corev1.EnvVar{{Name: "DATA", Value: "/data"}, {Name: "LOG_LEVEL", Value: "info"}, {Name: "REGION", Value: "eu"}},
				Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
					corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("8Gi"),
				}},
				VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}, {Name: "tmp", MountPath: "/tmp"}},
			}},
			Volumes: []corev1.Volume{
				{Name: "data", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}}},
				{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			},
		},
	}
	if i >= o.plain {
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
			protocol.ResourceMemory: *resource.NewQuantity(int64(request), resource.DecimalSI),
		}
		maps.Copy(pod.Annotations, protocol.Assignment{
			Cards: []protocol.AssignedCard{{Index: i / o.nodes % o.cards, Memory: cardMemory}}, Request: request, AssumeTime: time.Unix(1_700_000_000, int64(i)),
		}.Annotations())
	}
	return pod
}
