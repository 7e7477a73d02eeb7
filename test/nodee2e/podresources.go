package nodee2e

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// allocatable returns how many units the kubelet offers, allocated or not.
func (n *node) allocatable(ctx context.Context) (units int64, err error) {
	err = n.askKubelet(ctx, func(ctx context.Context, client podresourcesv1.PodResourcesListerClient) error {
		answer, err := client.GetAllocatableResources(ctx, &podresourcesv1.AllocatableResourcesRequest{})
		if err != nil {
			return fmt.Errorf("asking PodResources what is allocatable: %w", err)
		}
		for _, devices := range answer.Devices {
			if devices.ResourceName == string(protocol.ResourceMemory) {
				units += int64(len(devices.DeviceIds))
			}
		}
		return nil
	})
	return units, err
}

// askKubelet calls ask with a client of the kubelet's PodResources API. It opens a new connection for each call, because the
// kubelet may have restarted.
func (n *node) askKubelet(ctx context.Context, ask func(context.Context, podresourcesv1.PodResourcesListerClient) error) error {
	connection, err := grpc.NewClient("unix:"+n.podResourcesSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return ask(ctx, podresourcesv1.NewPodResourcesListerClient(connection))
}
