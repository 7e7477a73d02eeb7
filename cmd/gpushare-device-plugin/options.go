package main

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/gpushare/gpushare/cmd/internal/flagenv"
	"github.com/gpushare/gpushare/cmd/internal/logflags"
	"github.com/gpushare/gpushare/pkg/deviceplugin"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/version"
)

// options are what the flags say.
type options struct {
	kubeconfig         string
	nodeName           string
	memoryUnit         string
	visibleDevices     string
	deviceListStrategy string
	compatErrorEnv     bool
	devicePluginDir    string
	podResourcesSocket string
	nvmlLibrary        string
	healthQuietPeriod  time.Duration
	cardMemory         string
	// disableHealthChecks and enableHealthChecks are lists of Xids.
	disableHealthChecks string
	enableHealthChecks  string
	listenAddress       string
	authorizeMetrics    bool
	logging             *logsapi.LoggingConfiguration
	printInventory      bool
	cleanup             bool

	// cards is cardMemory, read by validate.
	cards inventory.CardMemory
}

func newCommand(environment func(string) (string, bool)) *cobra.Command {
	o := options{logging: logsapi.NewLoggingConfiguration()}
	command := &cobra.Command{
		Use:   "gpushare-device-plugin",
		Short: "Device plugin that shares GPU cards between pods by memory",
		Long: `gpushare-device-plugin asks NVIDIA's driver for the cards of this node, offers their memory to the kubelet as
aliyun.com/gpu-mem, and gives each container the card that was chosen for its pod.

It runs on every node that shares its cards, and keeps no state of its own: after a restart it rebuilds itself from the
API server and the kubelet's checkpoint. Without a driver, an API server or a kubelet it waits, and says so in its log
and at /readyz. It ends where only a new container helps: after five minutes without the driver's library, unless
--nvml-library says where that will be, and when the driver was exchanged under the loaded library.

Each flag can be given as an environment variable as well, named like the flag in capitals: NODE_NAME for --node-name.
The flag wins.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.Get().String(),
		PreRunE: func(command *cobra.Command, _ []string) error {
			return flagenv.Set(command.Flags(), environment)
		},
		RunE: func(command *cobra.Command, _ []string) error {
			if err := logflags.Apply(o.logging); err != nil {
				return err
			}
			unit, err := o.validate()
			if err != nil {
				return err
			}
			if o.printInventory {
				return printInventory(command.Context(), command.OutOrStdout(), o, unit)
			}
			if o.cleanup {
				return cleanUp(command.Context(), command.OutOrStdout(), o)
			}
			return serve(command.Context(), o, unit)
		},
	}
	f := command.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file`; the pod's own service account where empty")
	f.StringVar(&o.nodeName, "node-name", "", "`name` of this node's object")
	f.StringVar(&o.memoryUnit, "memory-unit", gpu.GiB.String(), "what one aliyun.com/gpu-mem stands for: GiB, MiB, or a number of them such as 256MiB")
	f.StringVar(&o.visibleDevices, "visible-devices", string(deviceplugin.VisibleByUUID), "how NVIDIA_VISIBLE_DEVICES names a card: uuid or index; with index a container that is restarted after the driver has renumbered the cards can start on another card")
	f.StringVar(&o.deviceListStrategy, "device-list-strategy", string(deviceplugin.ListByEnv), "how a card gets into a container: envvar leaves it to NVIDIA's container runtime, cdi-cri names a CDI device as well (nvidia.com/gpu=, by uuid or index as --visible-devices has it)")
	f.BoolVar(&o.compatErrorEnv, "compat-error-env", false, "start a container that no card can be given to all the same, with an environment that names none, as the existing plugin does; its pod fails otherwise")
	f.StringVar(&o.devicePluginDir, "device-plugin-dir", "/var/lib/kubelet/device-plugins", "the kubelet's `directory` of device plugins")
	f.StringVar(&o.podResourcesSocket, "pod-resources-socket", "/var/lib/kubelet/pod-resources/kubelet.sock", "`socket` at which the kubelet tells which pod it is admitting; goes by the order of scheduling where empty or missing")
	f.StringVar(&o.nvmlLibrary, "nvml-library", "", "`path` of libnvidia-ml.so.1; where the dynamic linker finds it if empty")
	f.DurationVar(&o.healthQuietPeriod, "health-quiet-period", inventory.DefaultQuietPeriod, "`time` that an unhealthy card must be without trouble, by probe and Xid errors, to be used again")
	f.StringVar(&o.cardMemory, "card-memory", "", "memory of cards that share the machine's, of which the driver reports none (GB10 and the like): a `size` for every card, such as 96Gi, or a list such as GPU-…=96Gi,GPU-…=48Gi; never more than the driver reports, where it does")
	f.StringVar(&o.disableHealthChecks, "dp-disable-healthchecks", "", "`Xids` that make no card unhealthy beside those that a program brings about, such as 48,63, or all; a list like that of NVIDIA's device plugin (DP_DISABLE_HEALTHCHECKS)")
	f.StringVar(&o.enableHealthChecks, "dp-enable-healthchecks", "", "`Xids` that make a card unhealthy whatever disables them, such as 31, or all; a list like that of NVIDIA's device plugin (DP_ENABLE_HEALTHCHECKS)")
	f.StringVar(&o.listenAddress, "listen-address", ":12346", "`address` of /livez, /readyz, /metrics and /version; off where empty")
	f.BoolVar(&o.authorizeMetrics, "authorize-metrics", false, "answer /metrics only for clients with a bearer token that may get the path /metrics; needs the right to create TokenReviews and SubjectAccessReviews")
	f.BoolVar(&o.cleanup, "cleanup", false, "take aliyun.com/gpu-count and the inventory annotation from the node's object and exit; for nodes that the plugin has left, from anywhere")
	f.BoolVar(&o.printInventory, "print-inventory", false, "print this node's cards as JSON and exit")

	logflags.Add(f, o.logging)
	return command
}

// validate checks what can be checked before anything starts.
func (o *options) validate() (gpu.Unit, error) {
	unit, err := gpu.ParseUnit(o.memoryUnit)
	if err != nil {
		return 0, fmt.Errorf("--memory-unit: %w", err)
	}
	if o.cards, err = inventory.ParseCardMemory(o.cardMemory); err != nil {
		return 0, fmt.Errorf("--card-memory: %w", err)
	}
	if o.printInventory {
		return unit, nil
	}
	switch v := deviceplugin.VisibleDevices(o.visibleDevices); v {
	case deviceplugin.VisibleByUUID, deviceplugin.VisibleByIndex:
	default:
		return 0, fmt.Errorf("--visible-devices: %q is neither %s nor %s", v, deviceplugin.VisibleByUUID, deviceplugin.VisibleByIndex)
	}
	switch s := deviceplugin.DeviceListStrategy(o.deviceListStrategy); s {
	case deviceplugin.ListByEnv, deviceplugin.ListByCDI:
	default:
		return 0, fmt.Errorf("--device-list-strategy: %q is neither %s nor %s", s, deviceplugin.ListByEnv, deviceplugin.ListByCDI)
	}
	if o.healthQuietPeriod <= 0 {
		return 0, fmt.Errorf("--health-quiet-period: %v is no time to wait", o.healthQuietPeriod)
	}
	if o.nodeName == "" {
		return 0, errors.New("--node-name (or NODE_NAME) is missing")
	}
	if !filepath.IsAbs(o.devicePluginDir) {
		return 0, fmt.Errorf("--device-plugin-dir: %q is not an absolute path", o.devicePluginDir)
	}
	if o.podResourcesSocket != "" && !filepath.IsAbs(o.podResourcesSocket) {
		return 0, fmt.Errorf("--pod-resources-socket: %q is not an absolute path", o.podResourcesSocket)
	}
	if o.listenAddress != "" {
		if _, _, err := net.SplitHostPort(o.listenAddress); err != nil {
			return 0, fmt.Errorf("--listen-address: %w", err)
		}
	}
	return unit, nil
}
