package simkubelet

import (
	"context"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/fake"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/test/check"
)

// A test with a rejected pod relies on ShowRejected, which no test with a real kubelet covers: only older ones show such
// pods.
func TestRejectedPodsInPodResources(t *testing.T) {
	for name, shown := range map[string]bool{"shown, as by kubelets 1.34 and 1.35": true, "not shown": false} {
		t.Run(name, func(t *testing.T) {
			root, err := os.MkdirTemp("", "sk") // The path is short because it contains sockets.
			check.Must(t, err)
			defer os.RemoveAll(root)
			api := fake.NewClientset(&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pod", UID: "uid", Annotations: map[string]string{AnnotationRejected: "Evicted"}},
				Spec:       corev1.PodSpec{NodeName: "node", Containers: []corev1.Container{{Name: "main"}}},
			})
			kubelet, err := New(Options{NodeName: "node", Client: api, Root: root, ShowRejected: shown})
			check.Must(t, err)
			check.Must(t, kubelet.Start(t.Context()))
			defer kubelet.Stop()
			err = wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
				pod, err := api.CoreV1().Pods("default").Get(ctx, "pod", metav1.GetOptions{})
				return err == nil && pod.Status.Phase == corev1.PodFailed && pod.Status.Reason == "Evicted", err
			})
			if err != nil {
				t.Fatalf("waiting until the pod is rejected: %v", err)
			}
			connection, err := grpc.NewClient("unix:"+kubelet.PodResourcesSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
			check.Must(t, err)
			defer connection.Close()
			_, err = podresourcesapi.NewPodResourcesListerClient(connection).
				Get(t.Context(), &podresourcesapi.GetPodResourcesRequest{PodNamespace: "default", PodName: "pod"})
			if (err == nil) != shown {
				t.Errorf("error is %v", err)
			}
		})
	}
}
